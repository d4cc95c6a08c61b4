"""Updates that still have to be told, each a bounded number of times, the freshest first. Pure."""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[str, str, str]  # ("member", id, accuser) or ("name", owner, name)


@dataclass
class _Rumour:
    encoded: bytes
    left: int  # transmissions
    order: int


class GossipQueue:
    """Rumours by key: a newer one about the same thing replaces the older."""

    def __init__(self) -> None:
        self._rumours: dict[Key, _Rumour] = {}
        self._order = 0

    def __bool__(self) -> bool:
        return bool(self._rumours)

    def put(self, key: Key, encoded: bytes, transmissions: int) -> None:
        self._order += 1
        self._rumours[key] = _Rumour(encoded, transmissions, self._order)

    def drop_member(self, node_id: str) -> None:
        """What was being told of the member is outdated."""
        for key in [key for key in self._rumours if key[0] == "member" and key[1] == node_id]:
            del self._rumours[key]

    def clear(self) -> None:
        self._rumours.clear()

    def take(self, room: int) -> bytes:
        """As many updates as fit into `room` bytes, least told first, then the latest; they count as told once."""
        if not self._rumours:
            return b""
        chosen = []
        for key, rumour in sorted(self._rumours.items(), key=lambda item: (-item[1].left, -item[1].order)):
            if len(rumour.encoded) > room:
                continue
            room -= len(rumour.encoded)
            chosen.append(rumour.encoded)
            rumour.left -= 1
            if rumour.left <= 0:
                del self._rumours[key]
        return b"".join(chosen)
