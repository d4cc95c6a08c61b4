from __future__ import annotations

import pytest

from ppsmoke.cluster import p256

# RFC 6979, A.2.5: P-256 with SHA-256
KEY = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721
PUBLIC = (
    "04"
    "60fed4ba255a9d31c961eb74c6356d68c049b8923b61fa6ce669622e60f29fb6"
    "7903fe1008b8bc99a41ae9e95628bc64f2f1b20c2d7e9f5177a3c294d4462299"
)
SIGNATURES = [
    (
        b"sample",
        0xEFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716,
        0xF7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8,
    ),
    (
        b"test",
        0xF1ABB023518351CD71D881567B1EA663ED3EFCF6C5132B354F28D3B0B7D38367,
        0x019F4113742A2B14BD25926B49C649155F267E60D3814B4C0CC84250E46F0083,
    ),
]


def test_the_public_key_is_the_one_of_the_rfc():
    assert p256.public_point(KEY).hex() == PUBLIC


@pytest.mark.parametrize(("message", "r", "s"), SIGNATURES)
def test_signatures_are_those_of_the_rfc(message, r, s):
    assert p256.sign(KEY, message) == (r, s)


@pytest.mark.parametrize("scalar", [0, p256.ORDER, -1])
def test_a_scalar_outside_the_group_is_refused(scalar):
    with pytest.raises(ValueError, match="1..ORDER-1"):
        p256.public_point(scalar)


@pytest.mark.parametrize("scalar", [1, 2, 3, p256.ORDER - 1, p256.ORDER - 2])
def test_scalars_at_the_ends_give_points_on_the_curve(scalar):
    point = p256.public_point(scalar)
    x, y = int.from_bytes(point[1:33], "big"), int.from_bytes(point[33:], "big")
    b = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
    assert (y * y - (x**3 - 3 * x + b)) % p256.FIELD == 0


def test_a_short_seed_for_a_scalar_is_refused():
    with pytest.raises(ValueError, match="48 bytes"):
        p256.scalar_from(b"k" * 32)
    assert 1 <= p256.scalar_from(b"\xff" * 48) < p256.ORDER
