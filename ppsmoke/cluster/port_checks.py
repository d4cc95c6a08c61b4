"""Dialability is a fact, not a setting: somebody else probes what a node says is mapped to it, and tells."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.events import PortCheck
from ppsmoke.cluster.handshake import NONCE_BYTES
from ppsmoke.cluster.peer import Peer
from ppsmoke.cluster.raw_sockets import within
from ppsmoke.cluster.roster import Roster
from ppsmoke.cluster.signals import DialBack, DialledBack
from ppsmoke.cluster.sockets import LinkMaker
from ppsmoke.errors import FrameError, LinkError
from ppsmoke.waiting import cancel_and_reap

ANSWER_S = 3.0  # beyond the connect limit, for the one who was asked to dial
MAX_REQUESTS = 8  # of others, at once


class PortChecks:
    def __init__(self, roster: Roster, maker: LinkMaker) -> None:
        self._roster = roster
        self._maker = maker
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await cancel_and_reap(*self._tasks)

    async def run(self, own_role: str, peers: Sequence[Peer]) -> list[PortCheck]:
        """Every mapped port of these peers dialled by us, and ours by one of them. What was linked over a mapped port
        is proven by that."""
        checks = [
            self._check_peer(own_role, peer, candidate)
            for peer in peers
            for candidate in (peer.candidates or peer.gossiped)
            if candidate.kind == "mapped"
        ]
        linked = [peer for peer in peers if peer.link is not None]
        if linked:
            mapped = [candidate for candidate in self._roster.candidates if candidate.kind == "mapped"]
            checks += [self._check_own(own_role, linked[0], candidate) for candidate in mapped]
        return list(await asyncio.gather(*checks))

    async def _check_peer(self, own_role: str, peer: Peer, candidate: Candidate) -> PortCheck:
        cause = ""
        where = peer.link.where if peer.link is not None else None
        if where is None or (where.host, where.tcp_port) != (candidate.host, candidate.tcp_port):
            cause = await self._probe(peer.node_id, candidate)
        return PortCheck(peer.name, candidate.host, candidate.tcp_port, own_role, cause)

    async def _check_own(self, own_role: str, helper: Peer, candidate: Candidate) -> PortCheck:
        self._number += 1
        answer = self._asked[self._number] = asyncio.get_running_loop().create_future()
        request = DialBack(self._number, self._maker.node_id, candidate.host, candidate.tcp_port)
        try:
            if not self._roster.tell(helper.node_id, request):
                cause = "the link to whoever should have dialled it is gone"
            else:
                await asyncio.wait({answer}, timeout=self._maker.timing.connect_s + ANSWER_S)
                cause = answer.result() if answer.done() else "no word of whoever should have dialled it"
        finally:
            del self._asked[request.number]
        return PortCheck(own_role, candidate.host, candidate.tcp_port, helper.name, cause)

    def on_request(self, peer: Peer, request: DialBack) -> None:
        """Only what the named node itself advertises is dialled: nobody shall scan through us."""
        known = self._roster.peers.get(request.node)
        advertised = (*known.candidates, *known.gossiped) if known is not None else ()
        wanted = [one for one in advertised if (one.host, one.tcp_port) == (request.host, request.port)]
        if not wanted or len(self._tasks) >= MAX_REQUESTS:
            self._roster.tell(peer.node_id, DialledBack(request.number, "it is not advertised, or too many ask"))
            return
        task = asyncio.ensure_future(self._answer(peer, request, wanted[0]))
        task.set_name(f"dial back {known.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_answer(self, peer: Peer, answer: DialledBack) -> None:
        asked = self._asked.get(answer.number)
        if asked is not None and not asked.done():
            asked.set_result(answer.cause)

    async def _answer(self, peer: Peer, request: DialBack, candidate: Candidate) -> None:
        cause = await self._probe(request.node, candidate)
        self._roster.tell(peer.node_id, DialledBack(request.number, cause))

    async def _probe(self, node_id: str, candidate: Candidate) -> str:
        """ "" if that node answers there, else why not."""
        where = f"{candidate.host}:{candidate.tcp_port}"
        seconds = self._maker.timing.connect_s
        try:
            raw = await self._maker.connect(candidate)
        except LinkError as error:
            return error.cause
        try:
            probing = self._maker.probe(raw.socket, peer_id=node_id, nonce=self._maker.machine.token(NONCE_BYTES))
            await within(seconds, probing, name=where, doing="whoever answered is no node of ours: nothing came back")
        except LinkError as error:
            return error.cause
        except FrameError:
            return f"{where}: whoever answered is not this node"
        finally:
            raw.close()
        return ""
