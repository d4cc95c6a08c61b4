"""The merging of byte-pair encoding: always the pair of lowest rank, of equal ones the leftmost, until none is left."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ppsmoke.errors import GgufError

_SHIFT = 32  # a pair of symbols as one integer: two thirds of a tuple's lookup time


class MergeTable:
    """Which pairs merge, into what and in which order. text_ids: the tokens that text may become."""

    def __init__(self, text_ids: dict[str, int], merges: Sequence[str], *, alphabet: Sequence[str]) -> None:
        self.text_ids = text_ids
        # A symbol is a token's id or, for what is no token but takes part in a merge, a number from here up.
        self._symbols = dict(text_ids)
        self._first_extra = max(text_ids.values(), default=-1) + 1
        self._extras: list[str] = []
        for character in alphabet:
            self._symbol(character)
        self._ranks: dict[int, int] = {}
        self._merged: list[int] = []
        for rank, merge in enumerate(merges):
            space = merge.find(" ", 1)
            if space < 0:
                raise GgufError(f"the merge {merge[:40]!r} does not name two parts")
            pair = self._symbol(merge[:space]) << _SHIFT | self._symbol(merge[space + 1 :])
            self._ranks.setdefault(pair, rank)
            self._merged.append(self._symbol(merge[:space] + merge[space + 1 :]))

    def encode(self, word: str) -> list[int]:
        """The word's token ids. A symbol that is no token falls apart into its characters; those that are no token
        either are dropped, as llama.cpp and Hugging Face do."""
        symbols = self._merge([self._symbol(character) for character in word])
        first = self._first_extra
        if not symbols or max(symbols) < first:
            return symbols
        ids: list[int] = []
        for symbol in symbols:
            ids += [symbol] if symbol < first else self._fall_apart(self._extras[symbol - first])
        return ids

    def _symbol(self, text: str) -> int:
        symbol = self._symbols.get(text)
        if symbol is None:
            symbol = self._symbols[text] = self._first_extra + len(self._extras)
            self._extras.append(text)
        return symbol

    def _fall_apart(self, text: str) -> list[int]:
        # llama.cpp looks up single bytes of the stand-in characters' UTF-8: so only ASCII ones are found.
        return [self.text_ids[character] for character in text if character < "\x80" and character in self.text_ids]

    def _merge(self, symbols: list[int]) -> list[int]:
        """Positions wait in one list per rank, and a heap holds the ranks: a long word costs a sort, not a heap
        operation for each of its pairs."""
        count = len(symbols)
        get_rank, merged = self._ranks.get, self._merged
        right = list(range(1, count + 1))  # the next symbol's position; count: none
        left = list(range(-1, count))  # the one before; one longer, so that position `count` may be written to
        pair_rank: list[int | None] = [get_rank(a << _SHIFT | b) for a, b in zip(symbols, symbols[1:], strict=False)]
        pair_rank.append(None)
        waiting: dict[int, list[int]] = {}
        for position, rank in enumerate(pair_rank):
            if rank is not None:
                waiting.setdefault(rank, []).append(position)
        ranks = list(waiting)
        heapq.heapify(ranks)
        while ranks:
            rank = heapq.heappop(ranks)
            positions = waiting.pop(rank)
            positions.sort()
            new_symbol = merged[rank]
            for done, position in enumerate(positions):
                if pair_rank[position] != rank:
                    continue  # one of the two has been merged with another neighbour since
                gone = right[position]
                after = right[position] = right[gone]
                left[after] = position
                pair_rank[gone] = None
                symbols[position], symbols[gone] = new_symbol, -1
                before = left[position]
                lowest = rank
                pairs = ((before, position), (position, after))
                for start, end in pairs:
                    if start < 0:
                        continue
                    new_rank = get_rank(symbols[start] << _SHIFT | symbols[end]) if end < count else None
                    pair_rank[start] = new_rank
                    if new_rank is None:
                        continue
                    if new_rank in waiting:
                        waiting[new_rank].append(start)
                    else:
                        waiting[new_rank] = [start]
                        heapq.heappush(ranks, new_rank)
                        lowest = min(lowest, new_rank)
                if lowest < rank:  # no trained vocabulary does that, but the order is the order
                    waiting[rank] = positions[done + 1 :]
                    heapq.heappush(ranks, rank)
                    break
        return [symbol for symbol in symbols if symbol >= 0]
