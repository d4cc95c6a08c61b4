"""llama-bpe with the real vocabulary of Llama 3, against tiktoken: another implementation of split and merging.

The vocabulary comes with Meta's package `llama-models`; its merges are derived as Hugging Face's converter does.
"""

from __future__ import annotations

import base64
import random
from importlib import metadata

import pytest

tiktoken = pytest.importorskip("tiktoken")

from ppsmoke.worker.tokenizer import BYTE_CHARACTERS, Tokenizer  # noqa: E402
from tests.worker.sources import DATA  # noqa: E402
from tests.worker.test_pretokenizer import LLAMA3, random_text  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    try:
        files = metadata.files("llama-models") or []
    except metadata.PackageNotFoundError:
        pytest.skip("llama-models is not installed")
    path = next(file for file in files if file.as_posix().endswith("llama3/tokenizer.model"))
    lines = path.locate().read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, filter(None, lines))}


@pytest.fixture(scope="module")
def ours(ranks) -> Tokenizer:
    def characters(token: bytes) -> str:
        return "".join(BYTE_CHARACTERS[byte] for byte in token)

    merges: list[str] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(ranks[a], ranks[b], a, b) for a, b in splits if a in ranks and b in ranks]
        merges += [f"{characters(a)} {characters(b)}" for _, _, a, b in sorted(known)]
    assert len(merges) == 280_147  # as many as Llama 3's GGUF files have
    tokens = [characters(token) for token in sorted(ranks, key=ranks.__getitem__)]
    return Tokenizer(tokens, merges, pre="llama-bpe")


@pytest.fixture(scope="module")
def theirs(ranks):
    return tiktoken.Encoding("llama3", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize("seed", range(4))
def test_random_text_gets_the_ids_of_tiktoken(ours, theirs, seed):
    for number in range(500):
        text = random_text(10_000 + seed * 1000 + number, 80)
        assert ours.encode(text, special="text") == theirs.encode(text, disallowed_special=()), ascii(text)


def test_prose_and_code_get_the_ids_of_tiktoken(ours, theirs):
    for path in [*DATA.glob("*.json"), *DATA.parent.rglob("*.py")]:
        text = path.read_text()
        assert ours.encode(text, special="text") == theirs.encode(text, disallowed_special=()), path


def test_pieces_of_the_vocabulary_in_any_order_get_the_ids_of_tiktoken(ours, theirs, ranks):
    chance, tokens = random.Random(7), list(ranks)
    for _ in range(1000):
        text = b"".join(chance.choices(tokens, k=12)).decode("utf-8", "replace").replace("\u017f", "s")
        assert ours.encode(text, special="text") == theirs.encode(text, disallowed_special=()), ascii(text)
