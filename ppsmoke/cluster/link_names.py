"""Names told from node to node over their links alone: what a cluster without SWIM can know."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple


class NameEntry(NamedTuple):
    name: str
    owner: str
    value: bytes
    generation: int


class LinkNames:
    def __init__(self, node_id: str, link_send: Callable[[str, bytes], bool], on_change: Callable[[], None]) -> None:
        self._node_id = node_id
        self._link_send = link_send
        self._on_change = on_change
        self._own: dict[str, tuple[str, int]] = {}
        self._heard: dict[str, dict[str, tuple[str, int]]] = {}

    def register(self, name: str, value: bytes, generation: int) -> None:
        self._own[name] = (value.decode(), generation)
        for peer in self._heard:
            self._tell(peer)
        self._on_change()

    def link_up(self, peer: str) -> None:
        self._heard.setdefault(peer, {})
        self._tell(peer)

    def link_down(self, peer: str) -> None:
        self._heard.pop(peer, None)

    def on_link_datagram(self, peer: str, data: bytes) -> None:
        self._heard[peer] = {name: (value, generation) for name, value, generation in json.loads(data)}
        self._on_change()

    def lookup(self, name: str) -> list[NameEntry]:
        found = []
        for owner, names in {**self._heard, self._node_id: self._own}.items():
            if name in names:
                value, generation = names[name]
                found.append(NameEntry(name, owner, value.encode(), generation))
        return sorted(found, key=lambda entry: (-entry.generation, entry.owner))

    def _tell(self, peer: str) -> None:
        entries = [(name, value, generation) for name, (value, generation) in self._own.items()]
        self._link_send(peer, json.dumps(entries).encode())
