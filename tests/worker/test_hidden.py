"""Hidden states on the wire: every bit pattern, rounding, clipping, and what is refused."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")

from ppsmoke.worker.hidden import FLOAT16_MAX, from_wire, to_wire  # noqa: E402


def bfloat16(word: int) -> bytes:
    return to_wire(np.array([word], np.uint32).view(np.float32), "bfloat16")


def test_every_bfloat16_survives_the_way_there_and_back():
    patterns = np.arange(1 << 16, dtype=np.uint32)
    values = from_wire(patterns.astype("<u2").tobytes(), "bfloat16", (1 << 16,))
    again = np.frombuffer(to_wire(values, "bfloat16"), "<u2")
    is_nan = np.isnan(values)
    assert (again[~is_nan] == patterns[~is_nan]).all()
    assert np.isnan(from_wire(again.astype("<u2").tobytes(), "bfloat16", (1 << 16,))[is_nan]).all()


@pytest.mark.parametrize(
    ("word", "rounded"),
    [
        (0x3F800000, 0x3F80),  # 1.0 exactly
        (0x3F808000, 0x3F80),  # a tie goes to the even neighbour, here down
        (0x3F818000, 0x3F82),  # and here up
        (0x3F808001, 0x3F81),  # above a tie: up
        (0x3F807FFF, 0x3F80),  # below a tie: down
        (0x7F7FFFFF, 0x7F80),  # the largest float32 is nearer to infinity
        (0x7F800000, 0x7F80),  # infinity
        (0x7FFFFFFF, 0x7FFF),  # a NaN with a full mantissa must not wrap to minus zero
        (0x80000000, 0x8000),  # minus zero
    ],
)
def test_float32_is_rounded_to_the_nearest_even_bfloat16(word, rounded):
    assert int.from_bytes(bfloat16(word), "little") == rounded


def test_float16_is_clipped_where_a_cast_would_give_infinity():
    values = np.array([65519.0, 65520.0, 3e38, -3e38, 1.0], np.float32)
    assert from_wire(to_wire(values, "float16"), "float16", (5,)).tolist() == [65504, 65504, 65504, -65504, 1]
    assert FLOAT16_MAX == 65504


def test_float32_is_unchanged_and_what_comes_back_can_be_written():
    values = np.random.default_rng(0).standard_normal((3, 5), dtype=np.float32)
    again = from_wire(to_wire(values, "float32"), "float32", (3, 5))
    assert (again == values).all() and again.flags.writeable


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_wrong_number_of_bytes_is_refused(dtype):
    data = to_wire(np.zeros((2, 3), np.float32), dtype)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(ValueError, match="bytes are no"):
            from_wire(wrong, dtype, (2, 3))


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="int8"):
        to_wire(np.zeros(1, np.float32), "int8")
    with pytest.raises(ValueError, match="int8"):
        from_wire(b"\0", "int8", (1,))
