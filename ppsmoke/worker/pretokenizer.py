r"""Text to words, as the pre-tokenizer that a model was trained with splits it.

The standard library's `re` knows no \p{L}. So every character is replaced by one that stands for its class, the
model's pattern is written in these stand-ins, and the spans that match are cut from the text itself. Patterns:
llama.cpp, llama-vocab.cpp (llm_tokenizer_bpe); tests compare them with the `regex` package's \p{L} and \p{N}.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator

from ppsmoke.errors import GgufError

MAX_CACHED_CHARACTERS = 1 << 16  # 6 MB; more different characters than that are looked up each time

# \s: Unicode's White_Space. str.isspace() would add 1c to 1f.
WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
WHITESPACE += "\u2028\u2029\u202f\u205f\u3000"
CONTRACTIONS = "stmdrevl"  # the letters of 's 't 'm 'd 're 've 'll

# The stand-ins: a to z a letter (those of CONTRACTIONS stand for themselves), 0 a number, \n a line break (\r too),
# a space for itself, \t other white space, ' for itself, . anything else.
_CONTRACTION = "'(?:[stmd]|re|ve|ll)"
_SPACE = r"[ \n\t]+"
_GPT2 = rf"{_CONTRACTION}| ?[a-z]+| ?0+| ?['.]+|{_SPACE}(?![a-z0'.])|{_SPACE}"
# Two passes in llama.cpp, each \p{N} alone and then GPT-2's on what is between: what ends at a number ends at an end.
_SMOLLM = rf"0|{_CONTRACTION}| ?[a-z]+| ?['.]+|{_SPACE}(?![a-z'.])|{_SPACE}"
_LLAMA3 = rf"{_CONTRACTION}|[^\na-z0]?[a-z]+|0{{1,3}}| ?['.]+\n*|[ \n\t]*\n+|{_SPACE}(?![a-z0'.])|{_SPACE}"

# name in tokenizer.ggml.pre: (pattern, contractions in capitals too)
_PATTERNS = {
    "gpt-2": (_GPT2, False),
    "smollm": (_SMOLLM, False),
    "llama-bpe": (_LLAMA3, True),
    "llama3": (_LLAMA3, True),
    "llama-v3": (_LLAMA3, True),
}
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")  # llama.cpp: these set ignore_merges and add_bos


def splitter(pre: str) -> Callable[[str], Iterator[str]]:
    """The function that cuts a text into words, none lost. Raises GgufError for a pre-tokenizer we do not know."""
    if pre not in _PATTERNS:
        hint = f"known pre-tokenizers: {', '.join(_PATTERNS)}"
        raise GgufError(f"the model's pre-tokenizer is {pre[:64]!r}", hint=hint)
    source, capitals = _PATTERNS[pre]
    pattern, classes = re.compile(source), _Classes(capitals=capitals)

    def split(text: str) -> Iterator[str]:
        for match in pattern.finditer(text.translate(classes)):
            yield text[match.start() : match.end()]

    return split


class _Classes(dict[int, str]):
    """Code point to stand-in, filled as characters are met."""

    def __init__(self, *, capitals: bool) -> None:
        super().__init__({ord(space): "\t" for space in WHITESPACE})
        self.update({ord("\n"): "\n", ord("\r"): "\n", ord(" "): " ", ord("'"): "'"})
        self.update({ord(letter): letter for letter in CONTRACTIONS})
        if capitals:
            self.update({ord(letter.upper()): letter for letter in CONTRACTIONS})

    def __missing__(self, code_point: int) -> str:
        category = unicodedata.category(chr(code_point))[0]
        stand_in = {"L": "a", "N": "0"}.get(category, ".")
        if len(self) < MAX_CACHED_CHARACTERS:
            self[code_point] = stand_in
        return stand_in
