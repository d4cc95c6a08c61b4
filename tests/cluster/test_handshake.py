from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ppsmoke.cluster.addresses import Address, Candidate
from ppsmoke.cluster.handshake import (
    PREAMBLE_BYTES,
    Bye,
    ByeReason,
    Hello,
    HelloRefused,
    LinkKind,
    Preamble,
    Resume,
    decode_candidates,
    encode_candidates,
    preamble_key,
)
from ppsmoke.errors import FrameError

KEY = preamble_key(b"k" * 32)
PREAMBLE = Preamble(LinkKind.DIRECT, "00112233445566aa", "ffeeddccbbaa9988", bytes(range(16)))
SEALED = bytes.fromhex(
    "5050534d 01 01 0000 00112233445566aa ffeeddccbbaa9988 000102030405060708090a0b0c0d0e0f 0000000000000000"
)
HELLO = Hello(
    version=1,
    node_id="00112233445566aa",
    epoch=1_800_000_000_000,
    resume=Resume(known_epoch=7, received=41, current_link=9),
    udp_port=7071,
    code_hash="ab" * 32,
    model="cd" * 32,
    candidates=(Candidate("host", "10.0.0.7", 7070, 7071), Candidate("mapped", "fe80::1", 40001)),
)


def test_a_preamble_has_the_bytes_of_the_format_and_comes_back():
    sealed = PREAMBLE.seal(KEY)
    assert len(sealed) == PREAMBLE_BYTES and sealed[:48] == SEALED
    assert Preamble.open(sealed, KEY) == PREAMBLE


@pytest.mark.parametrize("at", range(PREAMBLE_BYTES))
def test_a_preamble_changed_in_any_byte_is_refused(at):
    sealed = bytearray(PREAMBLE.seal(KEY))
    sealed[at] ^= 1
    with pytest.raises(FrameError):
        Preamble.open(bytes(sealed), KEY)


@pytest.mark.parametrize("length", [0, 1, 63, 65, 128])
def test_a_preamble_of_another_length_is_refused(length):
    with pytest.raises(FrameError):
        Preamble.open((PREAMBLE.seal(KEY) * 2)[:length], KEY)


def test_a_preamble_under_another_cluster_key_is_refused():
    with pytest.raises(FrameError, match="without the cluster's key"):
        Preamble.open(PREAMBLE.seal(preamble_key(b"x" * 32)), KEY)


def test_a_hello_comes_back():
    assert Hello.decode(HELLO.encode()) == HELLO


@pytest.mark.parametrize("cut", range(len(HELLO.encode())))
def test_a_hello_cut_anywhere_is_refused(cut):
    with pytest.raises(FrameError):
        Hello.decode(HELLO.encode()[:cut])


def test_a_hello_with_more_behind_it_is_refused():
    with pytest.raises(FrameError):
        Hello.decode(HELLO.encode() + b"\x00")


def test_of_another_protocol_only_the_version_is_read():
    assert Hello.decode(b"\x00\x02 and whatever comes with it").version == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "this side speaks protocol 1, stage-1-of-2 speaks 2"),
        ({"code_hash": "ef" * 32}, "this side runs code abababababab.., stage-1-of-2 runs efefefefefef.."),
        ({"model": "tiny"}, "this side expects model cdcdcdcdcdcd.., stage-1-of-2 has tiny"),
    ],
)
def test_hellos_that_do_not_fit_name_both_sides(change, text):
    with pytest.raises(HelloRefused) as caught:
        HELLO.compare(replace(HELLO, **change), "stage-1-of-2")
    assert caught.value.cause == text and caught.value.hint


@pytest.mark.parametrize("bye", [Bye(ByeReason.LEAVING), Bye(ByeReason.REFUSED, "warum nicht\u00fc")])
def test_a_bye_comes_back(bye):
    assert Bye.decode(bye.encode()) == bye


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x09too late"])
def test_a_bye_without_a_known_reason_is_refused(data):
    with pytest.raises(FrameError):
        Bye.decode(data)


@pytest.mark.parametrize(
    "data", [b"", b"\x09", b"\x01", b"\x01\x07\x00\x01\x00\x00\x01h", b"\x01\x00\x00\x00\x00\x00\x01h"]
)
def test_candidates_that_cannot_be_dialled_are_refused(data):
    with pytest.raises(FrameError):
        decode_candidates(data)


@pytest.mark.parametrize("seed", range(40))
def test_mutated_hellos_and_byes_decode_or_are_refused(seed):
    rng = random.Random(seed)
    for original, decode in ((HELLO.encode(), Hello.decode), (encode_candidates(HELLO.candidates), decode_candidates)):
        for _ in range(50):
            data = bytearray(original)
            for _ in range(rng.randrange(1, 5)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                decode(bytes(data[: rng.randrange(len(data) + 1)]))
            except FrameError:
                pass


@pytest.mark.parametrize("text", ["", "short/x", "00112233445566aa/", "00112233445566AA/x", "00112233445566aa" * 9])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError):
        Address.parse(text)


def test_an_address_comes_back_from_its_text():
    address = Address("00112233445566aa", "stage")
    assert Address.parse(str(address)) == address
