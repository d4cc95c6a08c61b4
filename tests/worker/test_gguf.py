"""The GGUF reader: what it reads, and what it refuses and how."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc

import pytest

pytest.importorskip("numpy")

from ppsmoke.errors import GgufError, InputError  # noqa: E402
from ppsmoke.worker import dequant  # noqa: E402
from ppsmoke.worker import gguf as gguf_module  # noqa: E402
from ppsmoke.worker.fetch import FileSource  # noqa: E402
from ppsmoke.worker.gguf import COMPUTABLE, Gguf  # noqa: E402
from ppsmoke.worker.tokenizer import Tokenizer  # noqa: E402
from tests.lab.tiny_gguf import (  # noqa: E402
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    STRING,
    U8,
    U16,
    U64,
    TensorBytes,
    TinyLlama,
    Typed,
    gguf_bytes,
    string,
)
from tests.worker.sources import DATA, MemorySource, smollm2_header  # noqa: E402

LLAMA = ("general.architecture", "llama")


def read(data: bytes) -> Gguf:
    return Gguf.read(MemorySource(data))


def tensor(name: str = "blk.0.attn_q.weight", dims=(32, 2), kind: int = 0, data: bytes = bytes(256), **more):
    return TensorBytes(name, dims, kind, data, **more)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.gguf")), ids=lambda path: path.stem)
def test_a_file_of_llama_cpp_reads_as_the_reference_reader_reads_it(path):
    reference = pytest.importorskip("gguf").GGUFReader(path)
    ours = Gguf.read(FileSource(path))
    assert list(ours.tensors) == [tensor.name for tensor in reference.tensors]
    for theirs in reference.tensors:
        info = ours.tensors[theirs.name]
        assert info.shape == tuple(int(dim) for dim in reversed(theirs.shape))
        assert (info.type, info.offset, info.nbytes) == (
            theirs.tensor_type.name,
            theirs.data_offset,
            theirs.n_bytes,
        )
    fields = {key: field for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, field in fields.items():
        value = ours.metadata[key]
        assert (value if isinstance(value, (str, int, float)) else list(value)) == field.contents()


def test_smollm2s_header_is_read_in_two_pieces_and_its_shape_is_known():
    source = smollm2_header()
    model = Gguf.read(source)
    assert len(source.reads) <= 2
    assert len(model.metadata) == 33 and len(model.tensors) == 272
    assert model.tensors["token_embd.weight"].shape == (49152, 576)
    assert model.tensors["token_embd.weight"].type == "Q8_0"
    assert model.tensors["blk.29.ffn_down.weight"].shape == (576, 1536)


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_read_alike(version):
    model = read(TinyLlama(blocks=2, version=version, rope_freqs=[1.0] * 8, output="own").to_bytes())
    assert model.integer("llama.block_count") == 2
    assert model.text("tokenizer.ggml.pre") == "llama-bpe"
    assert model.number("llama.rope.freq_base") == 500_000.0
    assert model.tensors["rope_freqs.weight"].shape == (8,)


def test_the_fingerprint_is_of_the_header_alone():
    model = TinyLlama()
    first = model.to_bytes()
    other_weights = first[:-1] + bytes([first[-1] ^ 1])
    assert read(first).fingerprint == read(other_weights).fingerprint
    assert read(first).fingerprint != read(TinyLlama(context=512).to_bytes()).fingerprint


def test_every_type_of_value_is_read():
    nested = Typed(ARRAY, struct.pack("<IQ", ARRAY, 2) + 2 * struct.pack("<IQ2h", 3, 2, -5, 5))
    numbers = Typed(ARRAY, struct.pack("<IQ3d", F64, 3, 0.5, -1.0, 1e300))
    pairs = [LLAMA, ("u8", Typed(U8, 255)), ("i8", Typed(I8, -128)), ("u16", Typed(U16, 65535)), ("yes", True)]
    pairs += [("u64", Typed(U64, 2**64 - 1)), ("f64", Typed(F64, 0.1)), ("text", "Ü🙂"), ("empty", "")]
    pairs += [("nested", nested), ("numbers", numbers), ("flags", Typed(ARRAY, struct.pack("<IQ2?", BOOL, 2, 1, 0)))]
    found = read(gguf_bytes(pairs)).metadata
    assert (found["u8"], found["i8"], found["u16"], found["yes"]) == (255, -128, 65535, True)
    assert (found["u64"], found["f64"], found["text"], found["empty"]) == (2**64 - 1, 0.1, "Ü🙂", "")
    assert [list(inner) for inner in found["nested"]] == [[-5, 5], [-5, 5]]
    assert list(found["numbers"]) == [0.5, -1.0, 1e300] and list(found["flags"]) == [1, 0]


def test_what_the_reader_can_compute_is_what_the_dequantisers_know():
    assert set(COMPUTABLE) == set(dequant.BLOCKS)
    for kind in gguf_module.TYPES.values():
        if kind.name in dequant.BLOCKS:
            assert dequant.BLOCKS[kind.name][:2] == (kind.weights, kind.nbytes)


def test_the_table_of_types_is_that_of_the_reference():
    reference = pytest.importorskip("gguf")
    for number, kind in gguf_module.TYPES.items():
        if kind.name == "Q8_1":
            continue  # never in a file; gguf-py still has its size from when its scales were 32 bits wide
        theirs = reference.GGMLQuantizationType(number)
        assert (kind.name, (kind.weights, kind.nbytes)) == (theirs.name, reference.GGML_QUANT_SIZES[theirs])


MANY = 2**60
REFUSED = {
    "nothing": (b"", "no GGUF"),
    "six bytes": (b"GGUF\3\0", "no GGUF"),
    "a zip": (b"PK\3\4" + bytes(100), "begins with b'PK"),
    "version 1": (gguf_bytes([LLAMA], version=1), "GGUF version 1"),
    "version 4": (gguf_bytes([LLAMA], version=4), "GGUF version 4"),
    "big-endian": (gguf_bytes([LLAMA], version=3 << 24), "big-endian"),
    "no architecture": (gguf_bytes([("general.name", "x")]), "architecture is not said"),
    "another architecture": (gguf_bytes([("general.architecture", "qwen3")]), "architecture is 'qwen3'"),
    "an architecture that is a number": (gguf_bytes([("general.architecture", 7)]), "architecture is not said"),
    "a key twice": (gguf_bytes([LLAMA, ("a", 1), ("a", 2)]), "'a' stands there twice"),
    "a key that is no UTF-8": (gguf_bytes([LLAMA, (b"\xff", 1)]), "no valid UTF-8"),
    "a text that is no UTF-8": (gguf_bytes([LLAMA, ("a", b"\xc3(")]), "'a' at byte 90 is no valid UTF-8"),
    "a token that is no UTF-8": (gguf_bytes([LLAMA, ("a", [b"ok", b"\xed\xa0\x80"])]), "no valid UTF-8"),
    "2^60 strings": (
        gguf_bytes([LLAMA, ("a", Typed(ARRAY, struct.pack("<IQ", STRING, MANY)))]),
        "claims 1152921504606846976 strings",
    ),
    "2^60 bytes": (gguf_bytes([LLAMA, ("a", Typed(ARRAY, struct.pack("<IQ", U8, MANY)))]), "claims 11529215"),
    "2^64-1 arrays": (gguf_bytes([LLAMA, ("a", Typed(ARRAY, struct.pack("<IQ", ARRAY, 2**64 - 1)))]), "claims 1844"),
    "a text of 2^60 bytes": (gguf_bytes([LLAMA, ("a", Typed(STRING, struct.pack("<Q", MANY)))]), "claims 11529"),
    "a text longer than the file": (gguf_bytes([LLAMA, ("a", Typed(STRING, struct.pack("<Q", 50)))]), "claims 50 b"),
    "2^60 keys": (gguf_bytes([LLAMA], claimed_keys=MANY), "claims 1152921504606846976 metadata keys"),
    "2^60 tensors": (gguf_bytes([LLAMA], claimed_tensors=MANY), "claims 1152921504606846976 tensors"),
    "one tensor too few": (gguf_bytes([LLAMA], claimed_tensors=1), "tensor '' has 0 dimensions"),
    "an unknown kind of value": (gguf_bytes([LLAMA, ("a", Typed(13, b""))]), "unknown value type 13"),
    "arrays in arrays in arrays": (
        gguf_bytes([LLAMA, ("a", Typed(ARRAY, struct.pack("<IQ", ARRAY, 1) * 9 + bytes(12)))]),
        "unknown value type 9",
    ),
    "an alignment of 3": (gguf_bytes([LLAMA, ("general.alignment", 3)]), "general.alignment is 3"),
    "an alignment of 0": (gguf_bytes([LLAMA, ("general.alignment", 0)]), "general.alignment is 0"),
    "an alignment that is a text": (gguf_bytes([LLAMA, ("general.alignment", "x")]), "general.alignment is x"),
    "a type we do not compute": (gguf_bytes([LLAMA], [tensor(kind=6)]), "'blk.0.attn_q.weight' has the type Q5_0"),
    "a type that nobody knows": (gguf_bytes([LLAMA], [tensor(kind=77)]), "has the type number 77"),
    "no dimensions": (gguf_bytes([LLAMA], [tensor(dims=())]), "has 0 dimensions"),
    "five dimensions": (gguf_bytes([LLAMA], [tensor(dims=(1, 1, 1, 1, 1))]), "has 5 dimensions"),
    "a width that no block divides": (gguf_bytes([LLAMA], [tensor(kind=3, dims=(33, 2))]), "impossible shape for Q4_1"),
    "a dimension of nothing": (gguf_bytes([LLAMA], [tensor(dims=(32, 0))]), "impossible shape"),
    "dimensions that overflow": (gguf_bytes([LLAMA], [tensor(dims=(2**32, 2**32))]), "ends at byte 73786976"),
    "a tensor beyond the end": (gguf_bytes([LLAMA], [tensor(offset=1 << 40)]), "ends at byte 1099511"),
    "a tensor cut short": (gguf_bytes([LLAMA], [tensor(data=bytes(255))]), "ends at byte 384 of 383"),
    "a tensor askew": (gguf_bytes([LLAMA], [tensor(data=bytes(999), offset=4)]), "offset 4 is no multiple of 32"),
    "two tensors on one place": (
        gguf_bytes([LLAMA], [tensor(), tensor("blk.0.attn_k.weight", offset=128)]),
        "'blk.0.attn_q.weight' and 'blk.0.attn_k.weight' overlap",
    ),
    "a tensor twice": (gguf_bytes([LLAMA], [tensor(), tensor()]), "stands there twice"),
}


@pytest.mark.parametrize(("data", "cause"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_cannot_be_used_is_refused_with_its_name_the_cause_and_a_hint(data, cause):
    with pytest.raises(GgufError) as caught:
        read(data)
    assert str(caught.value).startswith("memory.gguf: ") and cause in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250 and caught.value.hint


def test_a_tensor_that_no_llama_needs_may_have_any_type():
    model = read(gguf_bytes([LLAMA], [tensor("mm.projector", kind=77), tensor("vision.q", kind=6)]))
    assert [info.type for info in model.tensors.values()] == ["type 77", "Q5_0"]


def test_a_header_cut_anywhere_is_refused():
    data = TinyLlama(blocks=1).to_bytes()
    end = data.index(b"output_norm.weight") + 42
    for cut in range(0, end, 7):
        with pytest.raises(GgufError):
            read(data[:cut])


@pytest.mark.parametrize(
    ("key", "value"), [("llama.block_count", "six"), ("llama.block_count", 0), ("llama.block_count", True)]
)
def test_a_number_that_is_none_is_refused_by_its_key(key, value):
    pairs = [(name, value if name == key else old) for name, old in TinyLlama().metadata()]
    with pytest.raises(GgufError, match="llama.block_count is not an integer from 1"):
        read(gguf_bytes(pairs)).integer(key)


def test_a_key_that_is_missing_is_named_unless_there_is_a_default():
    model = read(gguf_bytes([LLAMA, ("nan", Typed(F32, float("nan")))]))
    assert model.integer("llama.rope.dimension_count", 64) == 64
    for ask in (model.integer, model.number, model.text):
        with pytest.raises(GgufError, match="the key llama.block_count is missing"):
            ask("llama.block_count")
    with pytest.raises(GgufError, match="nan is not a positive number"):
        model.number("nan")


def mutated(data: bytes, chance: random.Random) -> bytes:
    """A valid file with a few bytes, lengths or stretches changed, mostly in the header."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(min(len(changed), 9000)) if changed else 0
        match chance.randrange(6):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                changed[at : at + 8] = struct.pack("<Q", chance.choice([0, 1, 2**31, 2**32, 2**60, 2**63, 2**64 - 1]))
            case 2:
                changed[at : at + 4] = struct.pack("<I", chance.choice([0, 8, 9, 12, 2**31, 2**32 - 1]))
            case 3:
                del changed[at : at + chance.randrange(1, 64)]
            case 4:
                changed[at:at] = changed[at : at + chance.randrange(1, 64)]
            case 5:
                del changed[at:]
    return bytes(changed)


def fuzz(seeds: range) -> None:
    whole = TinyLlama(blocks=2, width=32, feed_forward=32, heads=2, kv_heads=1, rope_freqs=[1.0] * 8).to_bytes()
    refused = 0
    for seed in seeds:
        data = mutated(whole, random.Random(seed))
        try:
            Tokenizer.from_gguf(read(data).metadata).prompt_ids("Say hello", raw=False)
        except InputError as error:  # GgufError is one; an unknown chat template is another
            refused += 1
            assert "\n" not in str(error), seed
    assert 0.5 < refused / len(seeds) < 1.0


def test_300_mutated_files_with_other_seeds_are_read_or_refused():
    fuzz(range(5000, 5300))


@pytest.mark.slow
def test_2000_mutated_files_with_seeds_from_0_are_read_or_refused():
    fuzz(range(2000))


@pytest.mark.slow
def test_20000_mutated_files_with_seeds_from_10000_are_read_or_refused():
    fuzz(range(10_000, 30_000))


WORST = {
    "empty strings": (STRING, string("") * 8_000, 8_000),
    "strings of one character": (STRING, string("a") * 8_000, 8_000),
    "strings of two characters": (STRING, string("ab") * 8_000, 8_000),
    "bytes": (U8, bytes(200_000), 200_000),
    "empty arrays": (ARRAY, struct.pack("<IQ", U8, 0) * 8_000, 8_000),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "items", "count"), WORST.values(), ids=WORST)
def test_reading_takes_at_most_twelve_times_the_memory_that_the_file_has(kind, items, count):
    data = gguf_bytes([LLAMA, ("a", Typed(ARRAY, struct.pack("<IQ", kind, count) + items))])
    source = MemorySource(data)
    tracemalloc.start()
    try:
        read_back = Gguf.read(source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(read_back.metadata["a"]) == count
    assert peak < 12 * len(data)


def test_refusing_what_a_header_merely_claims_takes_no_memory_and_no_time():
    tracemalloc.start()
    started = time.perf_counter()
    try:
        for name in (
            "2^60 strings",
            "2^60 bytes",
            "2^64-1 arrays",
            "2^60 keys",
            "2^60 tensors",
            "a text of 2^60 bytes",
        ):
            with pytest.raises(GgufError):
                # a file that is as large as it likes, on a server that says so
                Gguf.read(MemorySource(REFUSED[name][0], size=2**62))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * gguf_module.MAX_HEADER_BYTES and time.perf_counter() - started < 20
