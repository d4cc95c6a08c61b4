"""The codec: golden bytes, every cut, seeded mutations, and no memory on the word of a header."""

from __future__ import annotations

import dataclasses
import random
import struct
import tracemalloc

import pytest

from ppsmoke.errors import MessageError
from ppsmoke.pipeline.messages import (
    MAX_NUMBERS,
    MAX_TEXT_BYTES,
    InferenceRequest,
    InferenceResponse,
    NextToken,
    Reset,
    StageActivation,
    StageFailed,
    StageStatus,
    decode,
    encode,
)

REPLY_TO = "00112233445566ff/orchestrator"
FIRST = StageActivation(
    request_id=7,
    position=0,
    seq_len=2,
    hidden_dim=3,
    dtype="bfloat16",
    is_prefill=True,
    last_chunk=False,
    max_tokens=64,
    reply_to=REPLY_TO,
    compute_us=(1500,),
    prompt_token_ids=(5, 6, 7),
    hidden=bytes(range(12)),
)
LATER = dataclasses.replace(
    FIRST, position=2, seq_len=1, last_chunk=True, max_tokens=0, reply_to="", prompt_token_ids=(), hidden=bytes(6)
)
GOLDEN = [
    (
        InferenceRequest(request_id=7, max_tokens=64, raw=False, reply_to=REPLY_TO, prompt="Say hello é"),
        "01 0700000000000000 40000000 00"
        "1d000000 303031313232333334343535363666662f6f7263686573747261746f72 0c000000 5361792068656c6c6f20c3a9",
    ),
    (
        FIRST,
        "02 0700000000000000 00000000 02000000 03000000 00 01 00 40000000"
        "1d000000 303031313232333334343535363666662f6f7263686573747261746f72 04000000 dc050000"
        "0c000000 050000000600000007000000 0c000000 000102030405060708090a0b",
    ),
    (
        LATER,
        "02 0700000000000000 02000000 01000000 03000000 00 01 01 00000000"
        "00000000 04000000 dc050000 00000000 06000000 000000000000",
    ),
    (
        NextToken(request_id=7, token_id=42, position=17, done=False, compute_us=(9, 8)),
        "03 0700000000000000 2a000000 11000000 00 08000000 0900000008000000",
    ),
    (
        InferenceResponse(
            request_id=7, finish_reason="length", token_ids=(42, 2), prompt_token_ids=(5,), text="hi", timings_json="{}"
        ),
        "04 0700000000000000 01 08000000 2a00000002000000 04000000 05000000 02000000 6869 02000000 7b7d",
    ),
    (
        StageStatus(stage=1, state="token", done=3, total=64, token_id=-1),
        "05 01000000 03 0300000000000000 4000000000000000 ffffffffffffffff 00000000 00000000",
    ),
    (
        StageFailed(request_id=0, stage=1, phase="load", cause="bad", hint="h"),
        "06 0000000000000000 01000000 04000000 6c6f6164 03000000 626164 00000000 01000000 68",
    ),
    (Reset(request_id=7), "07 0700000000000000"),
]


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_each_message_has_these_bytes_and_comes_back_equal(message, golden):
    assert encode(message).hex() == bytes.fromhex(golden).hex()
    assert decode(bytes.fromhex(golden)) == message


@pytest.mark.parametrize("message", [message for message, _ in GOLDEN], ids=lambda message: type(message).__name__)
def test_a_message_cut_anywhere_or_with_a_byte_too_many_is_refused(message):
    data = encode(message)
    for cut in range(len(data)):
        with pytest.raises(MessageError):
            decode(data[:cut])
    with pytest.raises(MessageError, match="1 bytes after its end"):
        decode(data + b"\0")


def changed(message, **fields):
    """The bytes of a message that could not be made: the checks are passed by."""
    forged = object.__new__(type(message))
    for name, value in {**{f.name: getattr(message, f.name) for f in dataclasses.fields(message)}, **fields}.items():
        object.__setattr__(forged, name, value)
    return encode(forged)


@pytest.mark.parametrize(
    ("message", "fields", "complaint"),
    [
        (FIRST, {"hidden": bytes(11)}, "StageActivation.hidden: 11 bytes where 2 x 3 of bfloat16 takes 12"),
        (FIRST, {"dtype": "float32"}, "StageActivation.hidden: 12 bytes where 2 x 3 of float32 takes 24"),
        (FIRST, {"seq_len": 0, "hidden": b""}, "StageActivation.seq_len: 0 positions"),
        (FIRST, {"hidden_dim": 0, "hidden": b""}, "StageActivation.hidden: 0 bytes"),
        (FIRST, {"hidden_dim": 0xFFFFFFFF}, "StageActivation.hidden: 12 bytes where"),
        (FIRST, {"reply_to": "nobody"}, "StageActivation.reply_to: no address"),
        (FIRST, {"max_tokens": 0}, "StageActivation.max_tokens: 0"),
        (FIRST, {"prompt_token_ids": (5,)}, "StageActivation.prompt_token_ids: 1 tokens"),
        (FIRST, {"last_chunk": True}, "StageActivation.prompt_token_ids: 3 tokens, but 2 positions are the last chunk"),
        (FIRST, {"is_prefill": False, "last_chunk": True}, "StageActivation.seq_len: 2 positions in a decode step"),
        (FIRST, {"request_id": 0}, "StageActivation.request_id: 0"),
        (LATER, {"is_prefill": False, "last_chunk": False}, "StageActivation.last_chunk: false in a decode step"),
        (LATER, {"max_tokens": 3}, "StageActivation.reply_to: set"),
        (LATER, {"prompt_token_ids": (1,)}, "StageActivation.reply_to: set"),
        (GOLDEN[0][0], {"reply_to": "/orchestrator"}, "InferenceRequest.reply_to: no address"),
        (GOLDEN[4][0], {"token_ids": ()}, "InferenceResponse.token_ids: empty"),
        (GOLDEN[5][0], {"token_id": -2}, "StageStatus.token_id: -2"),
        (GOLDEN[6][0], {"cause": ""}, "StageFailed.cause: empty"),
    ],
)
def test_fields_that_contradict_each_other_are_named_when_made_and_when_read(message, fields, complaint):
    with pytest.raises(MessageError) as read:
        decode(changed(message, **fields))
    assert str(read.value).startswith(complaint)
    with pytest.raises(MessageError) as made:
        dataclasses.replace(message, **fields)
    assert str(made.value) == str(read.value)


@pytest.mark.parametrize(
    ("golden", "complaint"),
    [
        ("", "kind: missing"),
        ("00", "kind: 0 is unknown"),
        ("08 0700000000000000", "kind: 8 is unknown"),
        ("03 0700000000000000 2a000000 11000000 02 00000000", "NextToken.done: 2 is neither 0 nor 1"),
        ("03 0700000000000000 2a000000 11000000 00 03000000 090000", "NextToken.compute_us: 3 bytes are no whole"),
        ("03 0700000000000000 2a000000 11000000 00 ffffffff 0900", "NextToken.compute_us: 4294967295 bytes claimed, 2"),
        ("04 0700000000000000 02 00000000", "InferenceResponse.finish_reason: 2 is no choice of stop, length"),
        ("06 0000000000000000 01000000 01000000 ff 00000000 00000000 00000000", "StageFailed.phase: no UTF-8"),
    ],
)
def test_bytes_that_are_no_message_are_refused_with_the_field(golden, complaint):
    with pytest.raises(MessageError) as error:
        decode(bytes.fromhex(golden))
    assert str(error.value).startswith(complaint)


@pytest.mark.parametrize(
    ("message", "fields", "complaint"),
    [
        (GOLDEN[0][0], {"prompt": "\ud83d"}, "InferenceRequest.prompt: character 0 is half of a surrogate pair"),
        (GOLDEN[0][0], {"max_tokens": 1 << 32}, "InferenceRequest.max_tokens: 4294967296 is not in"),
        (GOLDEN[0][0], {"max_tokens": True}, "InferenceRequest.max_tokens: True is not in"),
        (GOLDEN[0][0], {"raw": 1}, "InferenceRequest.raw: 1 is neither true nor false"),
        (GOLDEN[3][0], {"compute_us": (-1,)}, "NextToken.compute_us: something other than numbers"),
        (GOLDEN[3][0], {"compute_us": [1]}, "NextToken.compute_us: list is no tuple"),
        (FIRST, {"hidden": bytearray(12)}, "StageActivation.hidden: bytearray is no bytes"),
        (FIRST, {"dtype": "int8"}, "StageActivation.dtype: 'int8' is no choice of bfloat16, float16, float32"),
    ],
)
def test_what_has_no_bytes_cannot_be_made(message, fields, complaint):
    with pytest.raises(MessageError) as error:
        dataclasses.replace(message, **fields)
    assert str(error.value).startswith(complaint)


@pytest.mark.parametrize("seed", range(20))
def test_mutated_messages_decode_to_a_message_or_to_an_error_and_back_to_the_same_bytes(seed):
    random_of = random.Random(seed)
    samples = [encode(message) for message, _ in GOLDEN]
    for _ in range(300):
        data = bytearray(random_of.choice(samples))
        for _ in range(random_of.randint(1, 4)):
            at = random_of.randrange(len(data) + 1)
            match random_of.randrange(4):
                case 0 if at < len(data):
                    data[at] ^= 1 << random_of.randrange(8)
                case 1:
                    data[at : at + 4] = random_of.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", random_of.randbytes(4)])
                case 2:
                    del data[at : at + random_of.randint(1, 5)]
                case _:
                    data[at:at] = random_of.randbytes(random_of.randint(1, 5))
        try:
            message = decode(bytes(data))
        except MessageError:
            continue
        assert encode(message) == bytes(data)


def test_lengths_and_shapes_that_a_header_claims_cost_no_memory():
    huge = bytes.fromhex("ffffffff")
    claims = [encode(message) for message, _ in GOLDEN]
    claims = [data[:at] + huge + data[at + 4 :] for data in claims for at in range(9, len(data) - 4)]
    tracemalloc.start()
    try:
        for data in claims:
            try:
                decode(data)
            except MessageError:
                pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10


def _sized(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("prompt", b"\x01" + struct.pack("<QIB", 1, 9, 0) + _sized(b"") + _sized(bytes(MAX_TEXT_BYTES + 1))),
        ("compute_us", b"\x03" + struct.pack("<QIIB", 1, 2, 3, 0) + _sized(bytes(4 * (MAX_NUMBERS + 1)))),
    ],
    ids=["a text", "numbers"],
)
def test_what_would_take_many_times_its_bytes_is_refused_by_its_length(field, data):
    tracemalloc.start()
    with pytest.raises(MessageError, match=f"{field}: .* at most"):
        decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * len(data)


def test_neither_can_such_a_message_be_made():
    with pytest.raises(MessageError, match="compute_us: 1048577 numbers, at most"):
        NextToken(request_id=1, token_id=1, position=1, done=False, compute_us=(0,) * (MAX_NUMBERS + 1))
