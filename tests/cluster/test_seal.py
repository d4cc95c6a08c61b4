"""Sealed datagrams: each is let in once, and nothing else is."""

from __future__ import annotations

import random

import pytest

from ppsmoke.cluster.seal import MAX_EPOCHS_PER_SENDER, MAX_SENDERS, OVERHEAD_BYTES, WINDOW, Opener, Sealer, SealError

KEY = bytes(range(32))
A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
GOLDEN = "70707301aaaaaaaaaaaaaaaa0000000000000007000000000000000196e2101f65d1128dae87d101aeb66eb8f6f059f33f"


def sealer(node_id: str = A, epoch: int = 7, key: bytes = KEY) -> Sealer:
    return Sealer(key, node_id=node_id, epoch=epoch)


def opener() -> Opener:
    return Opener(KEY, node_id=B)


def refusal(target: Opener, datagram: bytes) -> str:
    before = sum(target.counts.values())
    with pytest.raises(SealError) as error:
        target.open(datagram)
    assert sum(target.counts.values()) == before + 1 and target.counts[error.value.reason] > 0
    return error.value.reason


def test_a_datagram_is_these_bytes_and_opens_to_what_was_sealed():
    datagram = sealer().seal(b"hello")
    assert datagram.hex() == GOLDEN
    assert opener().open(datagram) == (A, 7, 1, b"hello")
    assert len(datagram) == 5 + OVERHEAD_BYTES and OVERHEAD_BYTES == 44


@pytest.mark.parametrize("length", [0, 1, 1156, 65_000])
def test_any_length_goes_through(length):
    payload = random.Random(length).randbytes(length)
    assert opener().open(sealer().seal(payload)).payload == payload


def test_each_byte_tampered_with_is_noticed():
    datagram = sealer().seal(b"a payload")
    for at in range(len(datagram)):
        for bit in (1, 128):
            target = opener()
            broken = datagram[:at] + bytes([datagram[at] ^ bit]) + datagram[at + 1 :]
            assert refusal(target, broken) == ("wrong-magic" if at < 4 else "wrong-tag")
            assert target.open(datagram).payload == b"a payload"  # nothing was remembered of the forgery


def test_a_datagram_cut_anywhere_is_refused():
    datagram = sealer().seal(b"a payload")
    for cut in range(len(datagram)):
        assert refusal(opener(), datagram[:cut]) == ("too-short" if cut < OVERHEAD_BYTES else "wrong-tag")


def test_a_replay_is_refused_and_counted():
    target, datagram = opener(), sealer().seal(b"x")
    target.open(datagram)
    assert [refusal(target, datagram) for _ in range(3)] == ["replayed"] * 3
    assert target.counts == {"opened": 1, "replayed": 3}


@pytest.mark.parametrize("seed", range(5))
def test_reordered_datagrams_are_each_let_in_once(seed):
    source, target = sealer(), opener()
    datagrams = [source.seal(bytes([number % 256])) for number in range(WINDOW)]
    shuffled = datagrams[:]
    random.Random(seed).shuffle(shuffled)
    for datagram in shuffled:
        target.open(datagram)
    assert {refusal(target, datagram) for datagram in datagrams} == {"replayed"}


@pytest.mark.parametrize(("behind", "verdict"), [(WINDOW - 1, ""), (WINDOW, "too-old"), (WINDOW + 1, "too-old")])
def test_the_window_ends_where_it_says(behind, verdict):
    source, target = sealer(), opener()
    datagrams = [source.seal(b"") for _ in range(behind + 1)]
    target.open(datagrams[-1])
    if verdict:
        assert refusal(target, datagrams[0]) == verdict
    else:
        target.open(datagrams[0])


def test_a_jump_far_ahead_empties_the_window():
    source, target = sealer(), opener()
    early = [source.seal(b"") for _ in range(3)]
    target.open(early[0])
    late = [source.seal(b"") for _ in range(3 * WINDOW)][-1]
    target.open(late)
    assert {refusal(target, datagram) for datagram in early} == {"too-old"}


def test_another_key_an_echo_and_noise_are_refused():
    target = opener()
    assert refusal(target, sealer(key=bytes(32)).seal(b"x")) == "wrong-tag"
    assert refusal(target, sealer(node_id=B).seal(b"x")) == "own-echo"
    assert refusal(target, b"") == "too-short"
    assert refusal(target, bytes(100)) == "wrong-magic"


def test_lives_have_windows_of_their_own_and_the_oldest_are_forgotten_for_good():
    target = opener()
    first = [sealer(epoch=epoch).seal(b"") for epoch in range(1, MAX_EPOCHS_PER_SENDER + 1)]
    for datagram in first:
        target.open(datagram)
    assert refusal(target, first[0]) == "replayed"
    target.open(sealer(epoch=100).seal(b""))
    assert refusal(target, first[0]) == "forgotten-epoch"
    assert refusal(target, first[1]) == "replayed"


def test_a_raised_epoch_never_repeats_a_nonce():
    source = sealer(epoch=7)
    first = source.seal(b"same")
    source.raise_epoch(9)
    assert source.seal(b"same")[4:28] != first[4:28]
    with pytest.raises(ValueError):
        source.raise_epoch(9)


def test_the_number_of_senders_is_bounded():
    target = opener()
    for number in range(MAX_SENDERS):
        target.open(sealer(node_id=f"{number:016x}").seal(b""))
    assert refusal(target, sealer().seal(b"")) == "too-many-senders"


def test_the_same_text_never_looks_the_same():
    source = sealer()
    bodies = {source.seal(b"same text")[28:-16] for _ in range(50)}
    assert len(bodies) == 50 and b"same text" not in bodies


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_are_refused(seed):
    generator, target = random.Random(seed), opener()
    for _ in range(500):
        noise = generator.randbytes(generator.randrange(200))
        assert refusal(target, noise) in ("too-short", "wrong-magic")
        assert refusal(target, b"pps\x01" + noise) in ("too-short", "wrong-tag")
