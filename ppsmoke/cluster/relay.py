"""The relay that every node carries: brings two peers together that cannot dial each other, and passes bytes it cannot
read. It serves pairs to both of which this node has a direct link; a leg is dialled by whoever dialled that link.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.handshake import LinkKind, Preamble
from ppsmoke.cluster.peer import Peer
from ppsmoke.cluster.raw_sockets import RawSocket, tune
from ppsmoke.cluster.roster import Roster
from ppsmoke.cluster.signals import TOKEN_BYTES, LegClosed, NoLeg, Token
from ppsmoke.cluster.sockets import LinkMaker
from ppsmoke.errors import DeadlineExceeded, FrameError, LinkError
from ppsmoke.waiting import Deadline, cancel_and_reap

TOKEN_S = 10.0  # both legs must be there by then
MAX_PAIRS = 64  # waiting or spliced; a further one is refused
MAX_PAIRS_OF_ONE = 16
BUFFER_BYTES = 64 << 10  # in flight per direction; while it is full nothing more is read, so the sender waits
LAST_BYTES_S = 3.0  # after one side has hung up, what the other still says is passed on this long: it is a BYE
GO = b"\x01"  # on both legs, once they are spliced


@dataclass(frozen=True)
class RelayInfo:
    """A pair that is being relayed, or was last: names, and bytes each way."""

    one: str
    other: str
    bytes_from_one: int
    bytes_from_other: int


@dataclass(eq=False)
class _Pair:
    token: bytes
    asker: Peer
    other: Peer
    legs: dict[str, asyncio.Future[RawSocket]] = field(default_factory=dict)
    splice: Splice | None = None
    task: asyncio.Task[None] | None = None

    @property
    def both(self) -> tuple[Peer, Peer]:
        return self.asker, self.other

    @property
    def ids(self) -> frozenset[str]:
        return frozenset((self.asker.node_id, self.other.node_id))


class Relay:
    def __init__(self, roster: Roster, maker: LinkMaker) -> None:
        self.counts: Counter[str] = Counter()  # paired, spliced, refused, bad-token, expired, bytes
        self._roster = roster
        self._maker = maker
        self._pairs: dict[bytes, _Pair] = {}

    def pairs(self) -> list[RelayInfo]:
        """Who is being relayed now."""
        return [
            RelayInfo(pair.asker.name, pair.other.name, *pair.splice.bytes)
            for pair in self._pairs.values()
            if pair.splice is not None
        ]

    async def close(self) -> None:
        await cancel_and_reap(*(pair.task for pair in self._pairs.values() if pair.task is not None))

    def knows(self, token: bytes) -> bool:
        return token in self._pairs

    def on_connect(self, asker: Peer, to: str) -> None:
        """A peer asks for a way to another one."""
        other = self._roster.peers.get(to)
        reason = self._why_not(asker, other)
        if reason:
            self.counts["refused"] += 1
            self._roster.tell(asker.node_id, NoLeg(to, reason))
            return
        if any(pair.splice is None and pair.ids == {asker.node_id, to} for pair in self._pairs.values()):
            return  # the other side asked at the same time: both have their token
        loop = asyncio.get_running_loop()
        pair = _Pair(self._maker.machine.token(TOKEN_BYTES), asker, other)
        pair.legs = {peer.node_id: loop.create_future() for peer in pair.both}
        self._pairs[pair.token] = pair
        self.counts["paired"] += 1
        pair.task = asyncio.ensure_future(self._serve(pair))
        pair.task.set_name(f"relay {asker.name} and {other.name}")

    async def on_leg(self, raw: RawSocket, preamble: Preamble) -> None:
        """A peer has dialled its leg. Raises FrameError for one that nobody is waiting for: a token is good once, for
        its pair alone."""
        pair = self._pairs.get(preamble.nonce)
        leg = pair.legs.get(preamble.source) if pair is not None else None
        if leg is None or leg.done():
            self.counts["bad-token"] += 1
            raise FrameError("a relay leg with a token that is not, or no longer, good", reason="bad-token")
        leg.set_result(RawSocket(raw.hand_over()))

    def _why_not(self, asker: Peer, other: Peer | None) -> str:
        if other is None or other.link is None or other.superseded:
            return "it has no link to it either"
        if asker is other or asker.link is None:
            return "a node is not relayed to itself"
        for peer in (asker, other):
            if peer.link.kind is not LinkKind.DIRECT:
                return f"its own link to {peer.name} is {peer.link.kind.name.lower()}"
        if len(self._pairs) >= MAX_PAIRS:
            return f"it relays {MAX_PAIRS} pairs already"
        if sum(asker.node_id in pair.ids for pair in self._pairs.values()) >= MAX_PAIRS_OF_ONE:
            return f"it relays {MAX_PAIRS_OF_ONE} pairs for this node already"
        return ""

    async def _serve(self, pair: _Pair) -> None:
        try:
            await self._bring_together(pair)
            pair.splice = Splice(*(pair.legs[peer.node_id].result() for peer in pair.both))
            self.counts["spliced"] += 1
            ended_by, how = await pair.splice.run()
            reason = f"{pair.both[ended_by].name} {how}"
            for peer, other in (pair.both, pair.both[::-1]):
                self._roster.tell(peer.node_id, LegClosed(pair.token, other.node_id, reason))
        except (LinkError, DeadlineExceeded) as error:
            self.counts["expired"] += 1
            for peer, other in (pair.both, pair.both[::-1]):
                self._roster.tell(peer.node_id, NoLeg(other.node_id, error.cause))
        finally:
            del self._pairs[pair.token]
            for leg in pair.legs.values():
                if leg.done() and not leg.cancelled() and leg.exception() is None:
                    leg.result().close()
            self.counts["bytes"] += sum(pair.splice.bytes) if pair.splice else 0

    async def _bring_together(self, pair: _Pair) -> None:
        """Both legs are there, or LinkError."""
        opening = []
        try:
            for peer, other in (pair.both, pair.both[::-1]):
                link = peer.link
                if link is None:
                    raise LinkError(f"the link to {peer.name} is gone")
                self._roster.tell(
                    peer.node_id,
                    Token(pair.token, other.node_id, you_dial=not link.dialled, you_start=peer is pair.asker),
                )
                if link.dialled:
                    opening.append(asyncio.ensure_future(self._open(pair, peer, link.where)))
            deadline = Deadline.after(TOKEN_S)
            for peer in pair.both:
                try:
                    await deadline.wait(_shielded(pair.legs[peer.node_id]), doing=f"the leg of {peer.name}")
                except DeadlineExceeded:
                    raise LinkError(f"the leg of {peer.name} did not come within {TOKEN_S:g} s") from None
        finally:
            await cancel_and_reap(*opening)

    async def _open(self, pair: _Pair, peer: Peer, where: Candidate) -> None:
        """Dial the leg ourselves, to where we dialled the peer's link."""
        leg = pair.legs[peer.node_id]
        try:
            raw = await self._maker.open_leg(where, peer_id=peer.node_id, token=pair.token)
        except LinkError as error:
            if not leg.done():
                leg.set_exception(LinkError(f"the leg to {peer.name}: {error.cause}"))
        else:
            if leg.done():
                raw.close()
            else:
                leg.set_result(raw)


class Splice:
    """Two sockets joined: what one says the other hears, in both directions, until one of them ends."""

    def __init__(self, one: RawSocket, other: RawSocket) -> None:
        self.bytes = [0, 0]  # from one, from the other
        self._sockets = one, other

    async def run(self) -> tuple[int, str]:
        """Which of the two ended it (0 or 1), and how. The sockets stay the caller's to close."""
        for raw in self._sockets:
            tune(raw.socket)
        for side, raw in enumerate(self._sockets):
            try:
                await asyncio.get_running_loop().sock_sendall(raw.socket, GO)
            except OSError as error:
                return side, f"was lost ({_words(error)})"
        ways = [asyncio.ensure_future(self._pour(side)) for side in (0, 1)]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            first = 0 if ways[0].done() else 1
            ended_by, how = ways[first].result()
            if ended_by == first and not ways[1 - first].done():  # it hung up in good order
                await asyncio.wait(ways, timeout=LAST_BYTES_S)
            return ended_by, how
        finally:
            await cancel_and_reap(*ways)

    async def _pour(self, side: int) -> tuple[int, str]:
        """From that side to the other, until either fails or it hangs up."""
        loop, buffer = asyncio.get_running_loop(), bytearray(BUFFER_BYTES)
        source, target = self._sockets[side].socket, self._sockets[1 - side].socket
        with memoryview(buffer) as view:
            while True:
                try:
                    count = await loop.sock_recv_into(source, buffer)
                except OSError as error:
                    return side, f"was lost ({_words(error)})"
                try:
                    if not count:
                        target.shutdown(1)  # SHUT_WR: what it has still to say goes on
                        return side, "hung up"
                    await loop.sock_sendall(target, view[:count])
                except OSError as error:
                    return 1 - side, f"was lost ({_words(error)})"
                self.bytes[side] += count


async def _shielded(future: asyncio.Future[RawSocket]) -> RawSocket:
    return await asyncio.shield(future)


def _words(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
