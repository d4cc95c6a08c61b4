"""Key derivation against RFC 5869's construction, done independently with hashlib."""

import hashlib
import hmac

from ppsmoke.keys import derive, new_run_key


def test_a_derived_key_is_hkdf_sha256_with_our_salt_and_the_label_as_info():
    secret = bytes(range(32))
    extracted = hmac.new(b"ppsmoke/1", secret, hashlib.sha256).digest()
    first = hmac.new(extracted, b"node 1" + b"\x01", hashlib.sha256).digest()
    second = hmac.new(extracted, first + b"node 1" + b"\x02", hashlib.sha256).digest()
    assert derive(secret, "node 1") == first
    assert derive(secret, "node 1", 48) == first + second[:16]


def test_every_label_and_every_run_gives_another_key():
    keys = {derive(new_run_key(), label) for label in ("ca", "node 0", "node 1", "udp enc") for _ in range(3)}
    assert len(keys) == 12
