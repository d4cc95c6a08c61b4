"""The tokenizer: llama.cpp's ids for every prompt of the oracle, the corners, and its speed on a million characters."""

from __future__ import annotations

import json
import random
import time
from functools import cache

import pytest

from ppsmoke.errors import GgufError, InputError
from ppsmoke.worker.fetch import FileSource
from ppsmoke.worker.gguf import Gguf
from ppsmoke.worker.merges import MergeTable
from ppsmoke.worker.tokenizer import BYTE_CHARACTERS, Tokenizer, to_characters
from tests.worker.sources import DATA, smollm2_header

MODELS = {model["gguf"]: model for model in json.loads((DATA / "tiny.json").read_text())["models"]}
MODELS["smollm2"] = json.loads((DATA / "smollm2-f32.json").read_text())
ENTRIES = [(name, prompt["id"]) for name, model in MODELS.items() for prompt in model["prompts"]]


@cache
def tokenizer(name: str) -> Tokenizer:
    source = smollm2_header() if name == "smollm2" else FileSource(DATA / name)
    return Tokenizer.from_gguf(Gguf.read(source).metadata)


@pytest.mark.parametrize(("name", "prompt_id"), ENTRIES)
def test_the_ids_of_a_prompt_are_those_of_llama_cpp(name, prompt_id):
    prompt = next(prompt for prompt in MODELS[name]["prompts"] if prompt["id"] == prompt_id)
    found = 0
    for mode in ("raw", "chat"):
        if mode in prompt:
            found += 1
            assert tokenizer(name).prompt_ids(prompt["prompt"], raw=mode == "raw") == prompt[mode]["ids_plain"]
    assert found


@pytest.mark.parametrize("name", MODELS)
def test_the_ids_that_end_a_generation_are_those_of_llama_cpp(name):
    facts = MODELS[name]["model"]
    assert sorted(tokenizer(name).eog) == sorted(facts["eog"])
    assert (tokenizer(name).bos, tokenizer(name).add_bos) == (facts["bos"], facts["add_bos"])


@pytest.mark.parametrize("name", MODELS)
def test_a_text_with_its_control_tokens_parsed_has_the_ids_of_llama_cpps_programs(name):
    for prompt in MODELS[name]["prompts"]:
        bos = [tokenizer(name).bos] if tokenizer(name).add_bos else []
        if "raw" in prompt:
            assert bos + tokenizer(name).encode(prompt["prompt"], special="parse") == prompt["raw"]["ids"]


def made(tokens: list[str], merges: list[str], *, pre: str = "gpt-2", types=None, **keys) -> Tokenizer:
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return Tokenizer(tokens, merges, pre=pre, types=types, keys=named)


ALPHABET = list(BYTE_CHARACTERS)


def test_of_two_pairs_the_lower_rank_merges_first_and_of_equal_ones_the_left():
    tokens = [*ALPHABET, "ab", "bc", "abc", "aa", "aaa"]
    first = made(tokens, ["b c", "a b", "ab c", "a bc", "a a", "aa a"])
    assert [first.tokens[number] for number in first.encode("abc", special="text")] == ["abc"]
    assert [first.tokens[number] for number in first.encode("aaaaa", special="text")] == ["aa", "aaa"]
    second = made(tokens, ["a b", "b c"])
    assert [second.tokens[number] for number in second.encode("abcbc", special="text")] == ["ab", "c", "bc"]


def test_a_merge_that_enables_one_of_lower_rank_gives_it_precedence():
    merges = ["ab c", "x y", "a b"]  # "ab c" cannot come before "a b" made an ab, but then it is first
    table = MergeTable({token: number for number, token in enumerate("abcxy")}, merges, alphabet="abcxy")
    assert table.encode("abcab") == naive("abcab", table, merges)


def naive(word: str, table: MergeTable, merges: list[str]) -> list[int]:
    """The definition: look at all pairs, merge the one of lowest rank, the leftmost of equals; begin again."""
    symbols, ranks = list(word), {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(tuple(merge.split(" ")), rank)
    while pairs := [
        (ranks[pair], at) for at, pair in enumerate(zip(symbols, symbols[1:], strict=False)) if pair in ranks
    ]:
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found = []
    for symbol in symbols:
        found += [table.text_ids[symbol]] if symbol in table.text_ids else [table.text_ids[one] for one in symbol]
    return found


@pytest.mark.parametrize("seed", range(200))
def test_merging_random_words_with_random_ranks_follows_the_definition(seed):
    chance = random.Random(seed)
    parts, merges = list("abc"), []
    for _ in range(12):
        left, right = chance.choice(parts), chance.choice(parts)
        merges.append(f"{left} {right}")
        parts.append(left + right)
    chance.shuffle(merges)  # ranks that no training gives
    known = {part: number for number, part in enumerate(dict.fromkeys(parts[: chance.randrange(3, 15)]))}
    table = MergeTable(known, merges, alphabet="abc")
    for length in (1, 2, 3, 10, 40):
        word = "".join(chance.choice("abc") for _ in range(length))
        assert table.encode(word) == naive(word, table, merges), word


def test_a_word_that_is_a_token_needs_no_merge_for_llama_bpe_alone():
    tokens = [*ALPHABET, "hello"]
    assert made(tokens, [], pre="llama-bpe").encode("hello", special="text") == [256]
    assert len(made(tokens, [], pre="gpt-2").encode("hello", special="text")) == 5


def test_bytes_without_a_token_are_dropped():
    tokens = [character for character in ALPHABET if character not in (to_characters("\x04"), to_characters("b"))]
    bare = made(tokens, [])
    assert bare.decode(bare.encode("a\x04bc", special="text")) == "ac"
    assert bare.encode("\x04", special="text") == []


CONTROL = {"types": [1] * 256 + [3, 3, 4], "bos_token_id": 256}


def test_a_users_control_token_stays_text_and_a_user_defined_one_does_not():
    tokenizer = made([*ALPHABET, "<s>", "hello", "<tool>"], [], pre="llama-bpe", **CONTROL)
    assert tokenizer.encode("<s>", special="parse") == [256]
    assert len(tokenizer.encode("<s>", special="text")) == 3
    assert len(tokenizer.encode("hello", special="text")) == 5  # whole words first, but not control tokens
    assert tokenizer.encode("x<tool>", special="text") == [ALPHABET.index("x"), 258]


def test_a_control_token_adds_no_text_and_a_user_defined_one_its_name():
    tokenizer = made([*ALPHABET, "<s>", "hello", "<tool>"], [], **CONTROL)
    assert tokenizer.decode([256, ALPHABET.index("a"), 258, 257]) == "a<tool>"
    for wrong in (-1, 259):
        with pytest.raises(InputError, match=f"{wrong} is no token id"):
            tokenizer.token_bytes(wrong)


def test_bos_comes_once_whether_a_template_is_used_or_not():
    for raw in (True, False):
        ids = tokenizer("tiny-llama3-f32.gguf").prompt_ids("hello", raw=raw)
        assert ids.count(504) == 1 and ids[0] == 504


def test_without_add_bos_llama_bpe_gets_one_and_gpt_2_none():
    assert made([*ALPHABET, "<s>"], [], pre="llama-bpe", bos_token_id=256).prompt_ids("a", raw=True)[0] == 256
    assert made([*ALPHABET, "<s>"], [], pre="gpt-2", bos_token_id=256).prompt_ids("a", raw=True) == [97]
    assert made([*ALPHABET, "<s>"], [], pre="llama-bpe", bos_token_id=999).bos is None


@pytest.mark.parametrize("name", ["smollm2", "tiny-llama3-f32.gguf"])
def test_text_comes_back_as_it_was(name):
    text = "Häuser 北京 🙂🙂 it's\r\n\t 12345  ñ\u0301 \u200d👩‍👩‍👧 end"
    ids = tokenizer(name).encode(text, special="text")
    assert tokenizer(name).decode(ids) == text
    decoder = tokenizer(name).decoder()
    pieces = [decoder.push(number) for number in ids]
    assert "".join(pieces) + decoder.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_held_back_and_flushed_as_a_replacement():
    ids = tokenizer("tiny-llama3-f32.gguf").encode("🙂", special="text")
    assert len(ids) == 4
    decoder = tokenizer("tiny-llama3-f32.gguf").decoder()
    assert [decoder.push(number) for number in ids[:3]] == ["", "", ""]
    assert decoder.flush() == "\ufffd"
    assert [decoder.push(number) for number in ids] == ["", "", "", "🙂"] and decoder.flush() == ""


@pytest.mark.parametrize(
    ("text", "same_as"),
    [("a\ud800b", "a\ufffdb"), ("\ud83d\ude42", "🙂"), ("\udce4", "\ufffd"), ("\ude42\ud83d", "\ufffd" * 2)],
)
def test_surrogates_are_joined_or_replaced(text, same_as):
    assert tokenizer("smollm2").encode(text, special="text") == tokenizer("smollm2").encode(same_as, special="text")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer is 'llama'"),
        ({"tokenizer.ggml.model": None}, "tokenizer is 'None'"),
        ({"tokenizer.ggml.pre": "qwen2"}, "pre-tokenizer is 'qwen2'"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer is 'None'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": []}, "do not fit"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "stands there twice"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "no list of str"),
        ({"tokenizer.ggml.token_type": [1]}, "do not fit"),
        ({"tokenizer.ggml.token_type": ["x"] * 512}, "no list of int"),
        ({"tokenizer.ggml.merges": 3}, "tokenizer.ggml.merges is missing or is no list"),
    ],
)
def test_a_tokenizer_that_is_none_is_refused(change, cause):
    metadata = {**tokenizer("tiny-llama3-f32.gguf").keys, **change}
    with pytest.raises(GgufError) as caught:
        Tokenizer.from_gguf(metadata)
    assert cause in str(caught.value)


def test_a_merge_without_two_parts_is_refused():
    with pytest.raises(GgufError, match="the merge 'ab' does not name two parts"):
        made(ALPHABET, ["ab"]).encode("ab", special="text")


def test_an_unknown_chat_template_is_refused_and_raw_still_works():
    bare = made(ALPHABET, [])
    with pytest.raises(InputError, match="no chat template"):
        bare.prompt_ids("hi", raw=False)
    assert bare.prompt_ids("hi", raw=True) == [104, 105]


LONG = {
    "one letter": lambda _: "a" * 1_000_000,
    "one word": lambda chance: "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=1_000_000)),
    "spaces": lambda _: " " * 1_000_000,
    "emoji": lambda _: "🙂" * 250_000,
    "words": lambda chance: " ".join("".join(chance.choices("etaoins", k=5)) for _ in range(166_667)),
    "any character": lambda chance: "".join(map(chr, chance.choices(range(0x20, 0xD800), k=333_333))),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG)
def test_a_million_characters_take_seconds(kind):
    text = LONG[kind](random.Random(5))
    started = time.process_time()
    ids = tokenizer("smollm2").encode(text, special="text")
    assert time.process_time() - started < 30  # 1 to 7 s on an idle machine
    assert len(ids) > 1000


def test_the_time_for_one_word_does_not_grow_with_its_square():
    tokenizer("smollm2").encode("warm", special="text")

    def seconds(count: int) -> float:
        started = time.process_time()
        tokenizer("smollm2").encode("ab" * count, special="text")
        return time.process_time() - started

    small = min(seconds(2_000) for _ in range(3))
    assert min(seconds(40_000) for _ in range(2)) < 120 * small  # a square would be 400
