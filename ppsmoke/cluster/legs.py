"""Links over a relay, as their two ends see it: ask, get a token, have a leg, then everything as on a plain socket."""

from __future__ import annotations

import asyncio
from collections import Counter

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.asked import AskedLinks
from ppsmoke.cluster.handshake import LinkKind, Preamble
from ppsmoke.cluster.link import Link
from ppsmoke.cluster.peer import Peer
from ppsmoke.cluster.raw_sockets import RawSocket, receive_exactly, within
from ppsmoke.cluster.relay import GO, TOKEN_S
from ppsmoke.cluster.roster import Roster
from ppsmoke.cluster.signals import Connect, NoLeg, Token
from ppsmoke.cluster.sockets import LinkMaker
from ppsmoke.errors import FrameError, LinkError
from ppsmoke.waiting import cancel_and_reap

ASK_S = 2.0  # beyond TOKEN_S: a relay that has not answered by then has gone
MAX_TOKENS = 64  # that relays have given us, and no leg has come for yet


class Legs:
    def __init__(self, roster: Roster, maker: LinkMaker) -> None:
        self._roster = roster
        self._maker = maker
        self.counts: Counter[str] = Counter()  # bad-token: legs that nobody waits for; too-many-tokens
        self._asked = AskedLinks()  # of relays about peers
        self._expected: dict[tuple[str, bytes], asyncio.Future[Token]] = {}  # legs that relays dial, by relay and token
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await cancel_and_reap(*self._tasks)

    async def connect(self, peer: Peer, relay: Peer) -> Link:
        """A link over that relay that is up. Raises LinkError."""

        def ask() -> None:
            if not self._roster.tell(relay.node_id, Connect(peer.node_id)):
                error = LinkError(f"the link to the relay {relay.name} is gone")
                self._asked.settle(relay.node_id, peer.node_id, error)

        within_s = TOKEN_S + self._maker.timing.handshake_s + ASK_S
        silence = f"no answer from the relay {relay.name}"
        return await self._asked.wait(relay.node_id, peer.node_id, ask=ask, within_s=within_s, silence=silence)

    def on_refused(self, relay: Peer, refusal: NoLeg) -> None:
        error = LinkError(f"through {relay.name}: {refusal.reason}")
        self._asked.settle(relay.node_id, refusal.peer, error)

    def on_token(self, relay: Peer, token: Token) -> None:
        """The relay is ready for our leg, or about to dial it."""
        if token.peer == self._maker.node_id or token.peer == relay.node_id:
            return
        waiting = self._tasks if token.you_dial else self._expected
        if len(waiting) >= MAX_TOKENS or not self._roster.knows_or_has_room(token.peer):
            self.counts["too-many-tokens"] += 1
            return
        if token.you_dial:
            link = relay.link
            if link is None or link.where is None:
                # Our link was dialled by the relay after all: the two of us disagree for a moment about which is kept.
                error = LinkError(f"the relay {relay.name} waits to be dialled")
                self._asked.settle(relay.node_id, token.peer, error)
                return
            task = asyncio.ensure_future(self._dial_leg(relay, link.where, token))
            task.set_name(f"leg to {relay.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            expected = self._future_of(relay.node_id, token.token)
            if not expected.done():
                expected.set_result(token)

    async def on_leg(self, raw: RawSocket, preamble: Preamble) -> Link:
        """The relay has dialled our leg; its token may still be on the way. Raises FrameError, LinkError."""
        key = (preamble.source, preamble.nonce)
        relay = self._roster.peers.get(preamble.source)
        if relay is None or relay.link is None or (len(self._expected) >= MAX_TOKENS and key not in self._expected):
            self.counts["bad-token"] += 1
            raise FrameError("a relay leg that nobody here waits for", reason="bad-token")
        try:
            token = await asyncio.shield(self._future_of(*key))
        finally:
            self._expected.pop(key, None)  # good once
        return await self._link_over(raw, relay, token)

    def _future_of(self, relay_id: str, token: bytes) -> asyncio.Future[Token]:
        key = (relay_id, token)
        if key not in self._expected:
            loop = asyncio.get_running_loop()
            self._expected[key] = loop.create_future()
            loop.call_later(TOKEN_S, self._expected.pop, key, None)
        return self._expected[key]

    async def _dial_leg(self, relay: Peer, where: Candidate, token: Token) -> None:
        """where: what our link to the relay was dialled at; the link itself may be gone before this begins."""
        try:
            raw = await self._maker.open_leg(where, peer_id=relay.node_id, token=token.token)
            try:
                await self._link_over(raw, relay, token)
            finally:
                raw.close()
        except LinkError as error:
            through = LinkError(f"through {relay.name}: {error.cause}")
            self._asked.settle(relay.node_id, token.peer, through)

    async def _link_over(self, raw: RawSocket, relay: Peer, token: Token) -> Link:
        peer = self._roster.peer(token.peer)
        own_id = self._maker.node_id
        source, target = (own_id, peer.node_id) if token.you_start else (peer.node_id, own_id)
        try:
            await within(TOKEN_S, self._await_go(raw), name=f"relay {relay.name}", doing="the other leg did not come")
            handshake = self._maker.handshake(
                raw,
                Preamble(LinkKind.RELAYED, source, target, token.token),
                name=peer.name,
                dialled=token.you_start,
                via=relay.node_id,
            )
            seconds = self._maker.timing.handshake_s
            link = await within(seconds, handshake, name=f"relay {relay.name}", doing="no handshake")
        except LinkError as error:
            self._asked.settle(relay.node_id, peer.node_id, error)
            raise
        self._asked.settle(relay.node_id, peer.node_id, link)
        return link

    async def _await_go(self, raw: RawSocket) -> None:
        try:
            go = await receive_exactly(raw.socket, len(GO))
        except FrameError:
            raise LinkError("the relay hung up before the other leg had come") from None
        if go != GO:
            raise LinkError("the relay said something else than go")
