"""Byte-level BPE: text to token ids and back, as llama.cpp does it with the same file.

Merging is by rank, in O(n log n) for a word of any length. The merge table is built on the first encode: a stage that
only decodes never pays for it.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

from ppsmoke.errors import GgufError, InputError
from ppsmoke.worker import chat
from ppsmoke.worker.merges import MergeTable
from ppsmoke.worker.pretokenizer import LLAMA3_NAMES, splitter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
MAX_CACHED_WORDS, MAX_CACHED_WORD_CHARACTERS = 1 << 16, 64  # a few MB of the words that come again

# llama.cpp, llama-vocab.cpp, "special_eog_ids": these end a generation, whatever the keys say ...
EOG_NAMES = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
)
# ... and these three of fill-in-the-middle, each by its key or, without one, by the first of its names.
EOG_FILL_IN = {
    "tokenizer.ggml.fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "tokenizer.ggml.fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "tokenizer.ggml.fim_sep_token_id": ("<|file_sep|>",),
}
EOG_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def _byte_characters() -> list[str]:
    """GPT-2's bytes_to_unicode: the character that stands for each byte in a vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
BYTE_OF_CHARACTER = {ord(character): byte for byte, character in enumerate(BYTE_CHARACTERS)}
_TO_CHARACTERS = str.maketrans({chr(byte): character for byte, character in enumerate(BYTE_CHARACTERS)})


def to_characters(text: str) -> str:
    """A text's UTF-8 bytes, each as the character that stands for it."""
    return text.encode().decode("latin-1").translate(_TO_CHARACTERS)


class Tokenizer:
    """A model's vocabulary. eog: the ids that end a generation; bos: the id that begins a text, if there is one."""

    def __init__(
        self,
        tokens: list[str],
        merges: list[str],
        *,
        pre: str,
        types: list[int] | None = None,
        keys: Mapping[str, Any] | None = None,
    ) -> None:
        self.keys = dict(keys or {})
        self.tokens = tokens
        self.types = types if types is not None else [NORMAL] * len(tokens)
        self.ids = {token: number for number, token in enumerate(tokens)}
        if len(self.ids) != len(tokens) or len(self.types) < len(tokens) or not tokens:
            raise GgufError("the tokenizer's tokens and their types do not fit together, or a token stands there twice")
        self._split = splitter(pre)
        self._whole_words_first = pre in LLAMA3_NAMES
        self._merges = merges
        self._words: dict[str, tuple[int, ...]] = {}
        self.bos = self._id_key("tokenizer.ggml.bos_token_id")
        add_bos = self.keys.get("tokenizer.ggml.add_bos_token", pre in LLAMA3_NAMES)
        self.add_bos = bool(add_bos) and self.bos is not None
        self.eog = self._end_of_generation()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a GGUF file's metadata. Raises GgufError if it is of another kind or incomplete."""
        model = metadata.get("tokenizer.ggml.model")
        if model != "gpt2":
            hint = "byte-level BPE (gpt2) is the only one that can be used; Llama 1 and 2 have another"
            raise GgufError(f"the model's tokenizer is {str(model)[:64]!r}", hint=hint)
        tokens, merges = _list(metadata, "tokens", str), _list(metadata, "merges", str)
        types = _list(metadata, "token_type", int) if "tokenizer.ggml.token_type" in metadata else None
        pre = metadata.get("tokenizer.ggml.pre", "")
        return cls(tokens, merges, pre=str(pre), types=types, keys=metadata)

    def encode(self, text: str, *, special: Literal["text", "parse"]) -> list[int]:
        """Token ids without BOS. "text": what looks like a control token is text; "parse": it is that token."""
        return self._encode_parts([chat.Part(text, "user" if special == "text" else "template")])

    def prompt_ids(self, prompt: str, *, raw: bool) -> list[int]:
        """What the model is given for a prompt: raw, or as one user message in the model's chat template.

        Raises InputError if the chat template is missing or unknown.
        """
        if raw:
            parts = [chat.Part(prompt, "user")]
        else:
            template = self.keys.get("tokenizer.chat_template")
            parts = chat.render(template if isinstance(template, str) else None, prompt)
        ids = self._encode_parts(parts)
        return [self.bos, *ids] if self.add_bos and self.bos is not None else ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text: none for a control token. Raises InputError for no token's id."""
        if not 0 <= token_id < len(self.tokens):
            raise InputError(f"{token_id} is no token id: the vocabulary has {len(self.tokens)}")
        kind, token = self.types[token_id], self.tokens[token_id]
        if kind == USER_DEFINED:
            return token.encode()
        if kind != NORMAL or token_id in self.eog:
            return b""
        try:
            return bytes(map(BYTE_OF_CHARACTER.__getitem__, map(ord, token)))
        except KeyError:  # a character that stands for no byte: the file means it literally
            return token.encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def decoder(self) -> TokenDecoder:
        return TokenDecoder(self)

    def _encode_parts(self, parts: list[chat.Part]) -> list[int]:
        """The ids of the parts' texts as one text, in which only a template's own parts are searched for control
        tokens: a word may reach from one part into the next."""
        fragments: list[str | int] = []
        for part in parts:
            parsed = self._control_tokens + self._user_tokens if part.by == "template" else self._user_tokens
            for fragment in _partition(_without_surrogates(part.text), parsed):
                if isinstance(fragment, str) and fragments and isinstance(fragments[-1], str):
                    fragments[-1] += fragment
                else:
                    fragments.append(fragment)
        ids: list[int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                for word in self._split(fragment):
                    ids += self._words.get(word) or self._word_ids(word)
        return ids

    def _word_ids(self, word: str) -> tuple[int, ...]:
        characters = to_characters(word)
        whole = self._table.text_ids.get(characters) if self._whole_words_first else None
        ids = (whole,) if whole is not None else tuple(self._table.encode(characters))
        if len(word) <= MAX_CACHED_WORD_CHARACTERS and len(self._words) < MAX_CACHED_WORDS:
            self._words[word] = ids
        return ids

    @cached_property
    def _table(self) -> MergeTable:
        # A control token's name in a text is text, even where a merge or a whole word would spell it.
        text_ids = {
            token: number
            for number, token in enumerate(self.tokens)
            if self.types[number] not in (CONTROL, UNKNOWN, UNUSED)
        }
        return MergeTable(text_ids, self._merges, alphabet=BYTE_CHARACTERS)

    @cached_property
    def _control_tokens(self) -> list[tuple[str, int]]:
        return self._tokens_of_type(CONTROL, UNKNOWN)

    @cached_property
    def _user_tokens(self) -> list[tuple[str, int]]:
        """Tokens that are looked for before all else in any text (llama.cpp, tokenizer_st_partition)."""
        return self._tokens_of_type(USER_DEFINED)

    def _tokens_of_type(self, *kinds: int) -> list[tuple[str, int]]:
        return [(token, number) for number, token in enumerate(self.tokens) if token and self.types[number] in kinds]

    def _id_key(self, key: str) -> int | None:
        number = self.keys.get(key)
        valid = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(self.tokens)
        return number if valid else None

    def _end_of_generation(self) -> frozenset[int]:
        found = {self.ids[name] for name in EOG_NAMES if name in self.ids}
        found |= {number for key in EOG_KEYS if (number := self._id_key(key)) is not None}
        for key, names in EOG_FILL_IN.items():
            by_name = next((self.ids[name] for name in names if name in self.ids), None)
            number = self._id_key(key)
            found |= {number if number is not None else by_name} - {None}
        return frozenset(found)


class TokenDecoder:
    """Tokens to text as they come; the bytes of an unfinished character are held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is now certain, often none."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What was held back, as U+FFFD; the decoder may be used anew."""
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return text


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, (list, array)) or not all(type(value) is kind for value in values):
        raise GgufError(f"tokenizer.ggml.{name} is missing or is no list of {kind.__name__}")
    return list(values)


def _without_surrogates(text: str) -> str:
    """The text with surrogate pairs joined and single ones replaced: they have no UTF-8."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _partition(text: str, named: list[tuple[str, int]]) -> Iterator[str | int]:
    """The text cut at these tokens, the longest name first, each over the whole text, as llama.cpp does it."""
    fragments: list[str | int] = [text]
    for name, number in sorted(named, key=lambda item: -len(item[0].encode())):
        if name not in text:
            continue
        cut: list[str | int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                cut.append(fragment)
                continue
            for index, piece in enumerate(fragment.split(name)):
                cut += [number, piece] if index else [piece]
        fragments = cut
    return (fragment for fragment in fragments if fragment != "")
