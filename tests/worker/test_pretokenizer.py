r"""The split into words, against the same patterns with real \p{L} and \p{N} in the `regex` package."""

from __future__ import annotations

import random
import time
import unicodedata

import pytest

from ppsmoke.errors import GgufError
from ppsmoke.worker.pretokenizer import WHITESPACE, splitter

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CASES = {
    "gpt-2": [
        ("Hello world", ["Hello", " world"]),
        ("it's IT'S don't", ["it", "'s", " IT", "'", "S", " don", "'t"]),
        ("a  b   c", ["a", " ", " b", "  ", " c"]),
        ("x=12345, 6", ["x", "=", "12345", ",", " 6"]),
        ("tab\tx\n\n  y \n", ["tab", "\t", "x", "\n\n ", " y", " \n"]),
        ("\xa0a\u3000b\x1cc", ["\xa0", "a", "\u3000", "b", "\x1c", "c"]),
    ],
    "smollm": [
        ("1, 2", ["1", ",", " ", "2"]),
        ("a  12", ["a", "  ", "1", "2"]),
        ("Ⅷ²x 3", ["Ⅷ", "²", "x", " ", "3"]),
        ("  x", [" ", " x"]),
    ],
    "llama-bpe": [
        ("I'LL we'Ve", ["I", "'LL", " we", "'Ve"]),
        ("12345 67", ["123", "45", " ", "67"]),
        ("(foo)\r\n\r\n bar", ["(foo", ")\r\n\r\n", " bar"]),
        ("a \n \n  b", ["a", " \n \n", " ", " b"]),
        ("Häuser 北京🙂x", ["Häuser", " 北京", "🙂x"]),
    ],
}


@pytest.mark.parametrize(("pre", "text", "words"), [(pre, *case) for pre, cases in CASES.items() for case in cases])
def test_words_are_cut_where_the_model_was_trained_to_see_them(pre, text, words):
    assert list(splitter(pre)(text)) == words


def test_what_llama_cpp_calls_llama3_too_is_split_alike():
    for pre in ("llama3", "llama-v3"):
        assert list(splitter(pre)("I'LL 1234")) == ["I", "'LL", " ", "123", "4"]


@pytest.mark.parametrize("pre", ["default", "", "qwen2", "tekken", "x" * 999])
def test_an_unknown_pre_tokenizer_is_refused_by_its_name(pre):
    with pytest.raises(GgufError) as caught:
        splitter(pre)
    assert repr(pre[:64]) in str(caught.value) and "llama-bpe" in caught.value.hint


def reference(pre: str, text: str) -> list[str]:
    regex = pytest.importorskip("regex")
    if pre != "smollm":
        return regex.findall(GPT2 if pre == "gpt-2" else LLAMA3, text)
    words = []
    for piece in regex.split(r"(\p{N})", text):
        words += [piece] if regex.fullmatch(r"\p{N}", piece) else regex.findall(GPT2, piece)
    return words


def random_text(seed: int, length: int) -> str:
    """Characters of every kind, those that the patterns name above all; none that this Python does not know yet.

    The long s (U+017F) is left out: `(?i:'s)` matches it, llama.cpp's own code does not; we follow llama.cpp.
    """
    chance = random.Random(seed)
    named = "'stmdrevlSTMDREVL \t\r\n01 ²٣Ⅷ\u0301\u200b\x1c\x85\xa0\u2028!?.,-_ñДあ北🙂" + WHITESPACE

    def character() -> str:
        kind = chance.random()
        if kind < 0.7:
            return chance.choice(named)
        code_point = chance.randrange(0x3000) if kind < 0.9 else chance.randrange(0x110000)
        found = chr(code_point)
        return "x" if unicodedata.category(found) in ("Cn", "Cs") or found == "\u017f" else found

    return "".join(character() for _ in range(length))


@pytest.mark.parametrize("pre", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_random_text_is_split_as_by_the_pattern(pre, seed):
    for number in range(150):
        text = random_text(seed * 1000 + number, 60)
        words = list(splitter(pre)(text))
        assert "".join(words) == text
        assert words == reference(pre, text), ascii(text)


@pytest.mark.slow
@pytest.mark.parametrize("pre", CASES)
def test_every_character_is_split_as_by_the_pattern(pre):
    split = splitter(pre)
    for start in range(0, 0x110000, 256):
        known = [chr(code_point) for code_point in range(start, start + 256) if code_point != 0x17F]
        known = [character for character in known if unicodedata.category(character) not in ("Cn", "Cs")]
        text = "".join(f"a{character}b {character}'{character} " for character in known)
        assert list(split(text)) == reference(pre, text), hex(start)


@pytest.mark.slow
@pytest.mark.parametrize("pre", CASES)
@pytest.mark.parametrize("unit", [" ", "a", "'", "\n \n", " \n", "1", "a ", "'s", "🙂"])
def test_a_long_text_is_split_in_linear_time(pre, unit):
    split = splitter(pre)

    def seconds(count: int) -> float:
        started = time.process_time()
        assert sum(map(len, split(unit * count))) == count * len(unit)
        return time.process_time() - started

    # A square would make it 400 times as long. The best of three, since other work runs beside the tests.
    small = min(seconds(2_000) for _ in range(3))
    assert min(seconds(40_000) for _ in range(3)) < 150 * max(small, 1e-4)
