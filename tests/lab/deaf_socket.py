"""A socket that does not hear a RST, as behind a silent firewall: on loopback, where a SYN that comes too early is
answered by a RST at once, nothing else lets two ends open a connection simultaneously. Linux."""

from __future__ import annotations

import ctypes
import socket
import struct

from ppsmoke.cluster.machine import Machine
from ppsmoke.cluster.raw_sockets import reusing_socket

SO_ATTACH_FILTER = 26
_FLAGS_BYTE, _RST = 13, 0x04  # of a TCP header
# Load the flags; if RST is set drop the packet, else keep all of it. linux/filter.h: code, jump if true, if false, k
_PROGRAM = ((0x30, 0, 0, _FLAGS_BYTE), (0x45, 0, 1, _RST), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))


def deaf_socket(family: int, port: int) -> socket.socket:
    sock = reusing_socket(family, port)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _PROGRAM))
    program = struct.pack("HL", len(_PROGRAM), ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    return sock


class DeafMachine(Machine):
    def reusing_socket(self, family: int, port: int) -> socket.socket:
        return deaf_socket(family, port)
