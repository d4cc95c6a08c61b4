"""Signals: golden bytes, and whatever else arrives is a FrameError."""

from __future__ import annotations

import random

import pytest

from ppsmoke.cluster.frames import _LIMITS, FrameType
from ppsmoke.cluster.handshake import Observed
from ppsmoke.cluster.signals import (
    MAX_TARGETS,
    Connect,
    DialBack,
    DialledBack,
    LegClosed,
    Mapped,
    NoLeg,
    NoPunch,
    PunchAsk,
    PunchAt,
    Rendezvous,
    Token,
    decode_signal,
    encode_signal,
)
from ppsmoke.errors import FrameError

NODE, TOKEN = "00112233445566aa", bytes(range(16))
SIGNALS = [
    Connect(NODE),
    Token(TOKEN, NODE, you_dial=True, you_start=False),
    NoLeg(NODE, "it has no link to it either"),
    LegClosed(TOKEN, NODE, "stage-0 hung up"),
    PunchAsk(NODE),
    Rendezvous(TOKEN, NODE, 40_001),
    Mapped(TOKEN, 50_000, 120_000, (("10.0.0.7", 50_000),), ""),
    PunchAt(TOKEN, NODE, 50_000, (("198.51.100.1", 50_000), ("fd00::1", 1))),
    NoPunch(NODE, "another port per destination", for_good=True),
    DialBack(7, NODE, "203.0.113.7", 40_001),
    DialledBack(7, ""),
]


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: type(signal).__name__)
def test_a_signal_survives_its_bytes_and_no_cut_of_them_decodes(signal):
    data = encode_signal(signal)
    assert decode_signal(data) == signal
    for cut in range(len(data)):
        with pytest.raises(FrameError):
            decode_signal(data[:cut])
    with pytest.raises(FrameError):
        decode_signal(data + b"\0")


def test_the_bytes_are_what_they_were():
    assert encode_signal(SIGNALS[1]).hex() == "02" + TOKEN.hex() + NODE + "01" + "00"
    assert encode_signal(SIGNALS[9]).hex() == "0a00000007" + NODE + "0b" + b"203.0.113.7".hex() + "9c41"


def test_the_longest_signal_fits_into_its_frame():
    longest = "2001:0db8:1111:2222:3333:4444:5555:6666%" + "z" * 32
    most = PunchAt(TOKEN, NODE, 1, tuple((longest, port) for port in range(MAX_TARGETS + 3)))
    data = encode_signal(most)
    assert len(data) <= _LIMITS[FrameType.SIGNAL].most
    assert len(decode_signal(data).targets) == MAX_TARGETS


@pytest.mark.parametrize("seed", range(20))
def test_no_mutation_of_a_signal_does_more_than_raise_frame_error(seed):
    rng = random.Random(seed)
    for _ in range(500):
        data = bytearray(encode_signal(rng.choice(SIGNALS)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode_signal(bytes(data))
        except FrameError:
            pass


@pytest.mark.parametrize("host", ["198.51.100.1", "2001:db8:1111:2222:3333:4444:5555:6666"])
def test_an_observed_address_is_believed_with_the_key_and_for_its_probe_alone(host):
    key, nonce = b"k" * 32, b"n" * 16
    data = Observed(host, 50_000).seal(key, nonce)
    assert len(data) == 64 and Observed.open(data, key, nonce) == Observed(host, 50_000)
    for other_key, other_nonce in ((b"x" * 32, nonce), (key, b"x" * 16)):
        with pytest.raises(FrameError):
            Observed.open(data, other_key, other_nonce)
