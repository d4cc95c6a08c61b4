"""Who must not get in at a boot's port, whatever they send; and the true push arrives all the same."""

import hashlib
import socket
import sys
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

from ppsmoke.errors import DeadlineExceeded
from ppsmoke.rent.process_one import HEADER_BYTES, HELLO_S, MAGIC, MAX_PEERS, proof
from ppsmoke.rent.push import BootFailed, build_payload
from tests.lab.small_container import SECRET, Container, container
from tests.rent.boot_lab import PAYLOAD, end_node, push_to, status_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a rented container is Linux")


@contextmanager
def connected(it: Container):
    """A raw connection to the boot, and its nonce."""
    with socket.create_connection(("127.0.0.1", it.port), timeout=10) as peer:
        greeting = b""
        while len(greeting) < len(MAGIC) + 32:
            greeting += peer.recv(99)
        yield peer, greeting[len(MAGIC) :]


def dropped(peer: socket.socket) -> bytes:
    """What the boot still says before it hangs up."""
    said = b""
    try:
        while data := peer.recv(4096):
            said += data
    except ConnectionResetError:
        pass
    return said


def header(payload=PAYLOAD, *, size=None, digest=None, nonce=b"n" * 32) -> bytes:
    size = len(payload) if size is None else size
    return nonce + b"P" + size.to_bytes(8, "big") + (digest or hashlib.sha256(payload).digest())


def wrong_key(it):
    with connected(it) as (peer, nonce):
        peer.sendall(header() + proof(b"k" * 32, b"peer", nonce + header()) + PAYLOAD[:1000])
        return dropped(peer)


def no_key(it):
    with connected(it) as (peer, nonce):
        peer.sendall(header() + proof(b"", b"peer", nonce + header()))
        return dropped(peer)


def replay(it):
    with connected(it) as (peer, nonce):  # a true header, as somebody on the way would have seen it
        recorded = header() + proof(SECRET, b"peer", nonce + header())
    with connected(it) as (peer, _):
        peer.sendall(recorded + PAYLOAD[:1000])
        return dropped(peer)


def reflection(it):
    with connected(it) as (peer, nonce):  # the boot's own kind of proof does not open the door
        mirrored = header(nonce=nonce)
        peer.sendall(mirrored + proof(SECRET, b"boot", nonce + mirrored))
        return dropped(peer)


def garbage(it):
    with connected(it) as (peer, _):
        peer.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(range(256)) * 8)
        return dropped(peer)


def empty(it):
    with connected(it) as (peer, _):
        peer.shutdown(socket.SHUT_WR)
        return dropped(peer)


def oversize_claim(it):
    with connected(it) as (peer, nonce):
        huge = header(size=1 << 60)
        peer.sendall(huge + proof(SECRET, b"peer", nonce + huge) + b"x" * 1000)
        return dropped(peer)[32:]


def truncated_body(it):
    with connected(it) as (peer, nonce):
        peer.sendall(header() + proof(SECRET, b"peer", nonce + header()) + PAYLOAD[:-1])
        peer.shutdown(socket.SHUT_WR)
        return dropped(peer)[32:]


def wrong_digest(it):
    with connected(it) as (peer, nonce):
        peer.sendall(header() + proof(SECRET, b"peer", nonce + header()) + PAYLOAD[:-1] + b"?")
        return dropped(peer)[32:]


ATTACKS = [wrong_key, no_key, replay, reflection, garbage, empty, oversize_claim, truncated_body, wrong_digest]


def test_no_wrong_peer_gets_an_answer_or_runs_anything_and_the_true_push_still_arrives(tmp_path):
    with container(tmp_path) as it:
        it.says("listening")
        for attack in ATTACKS:
            assert attack(it) == b"", attack.__name__
        assert not (tmp_path / "node.json").exists() and list(it.home.glob("*.pyz")) == []
        push_to(it)
        it.node()


@pytest.mark.slow
def test_code_that_cannot_run_leaves_the_boot_listening_for_code_that_can(tmp_path):
    with container(tmp_path) as it:
        it.says("listening")
        with pytest.raises(DeadlineExceeded):
            push_to(it, build_payload("{}", b"no zipapp at all"), within_s=1.0)
        it.says("peer dropped: ModuleNotFoundError")
        push_to(it)
        it.node()


@pytest.mark.slow
def test_the_same_attacks_on_a_boot_whose_node_has_ended_do_as_little(tmp_path):
    with container(tmp_path) as it:
        push_to(it)
        it.node()
        end_node(it)
        it.says("listening", times=3)
        for attack in ATTACKS:
            assert attack(it) == b"", attack.__name__
        assert not (tmp_path / "node.json").exists() and status_of(it).state == "ended"


def test_a_boot_without_a_secret_lets_nobody_in(tmp_path):
    with container(tmp_path, PPSMOKE_NODE_SECRET="") as it:
        it.says("listening")
        with suppress(ConnectionResetError), connected(it) as (peer, nonce):  # it may hang up before we have spoken
            peer.sendall(header() + proof(b"", b"peer", nonce + header()) + PAYLOAD)
            assert dropped(peer) == b""


def test_forty_peers_that_drip_bytes_do_not_keep_the_true_one_out(tmp_path):
    with container(tmp_path) as it, ExitStack() as slow:
        it.says("listening")
        peers = [slow.enter_context(connected(it))[0] for _ in range(40)]
        for peer in peers[-MAX_PEERS:]:
            peer.sendall(b"x" * (HEADER_BYTES - 1))
        assert dropped(peers[0]) == b""  # the oldest made room
        report = push_to(it)
        assert report.attempts == 1
        it.node()  # it has the port although slow peers are still connected


@pytest.mark.slow
def test_a_peer_that_drips_bytes_is_dropped_after_ten_seconds_however_lively_it_is(tmp_path):
    with container(tmp_path) as it:
        it.says("listening")
        with connected(it) as (peer, _):
            began = time.monotonic()
            peer.settimeout(0.5)
            with suppress(ConnectionError):
                while time.monotonic() - began < 2 * HELLO_S:
                    peer.sendall(b"x")
                    with suppress(TimeoutError):
                        if not peer.recv(1):
                            break
            assert HELLO_S - 1 < time.monotonic() - began < 2 * HELLO_S


@pytest.mark.slow
def test_wrong_secrets_on_either_side_are_named_after_a_few_tries(tmp_path):
    with container(tmp_path) as it:
        with pytest.raises(BootFailed, match="did not accept our proof of the stage's secret") as failed:
            push_to(it, secret=b"w" * 32)
        assert failed.value.kind == "proof" and failed.value.stage == 1


@pytest.mark.slow
def test_a_boot_of_which_nothing_is_there_is_an_error_that_says_what_was_seen(tmp_path):
    it = Container(tmp_path)  # never started
    with pytest.raises(DeadlineExceeded, match=r"bringing the code to 127.0.0.1:\d+ \(.*refused.*; \d+ attempts\)"):
        push_to(it, within_s=1.0)
