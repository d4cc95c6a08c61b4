"""The stage actor: one stage's part in a request, whatever its place in the chain.

Stage 0 tokenises and cuts the prompt in chunks, every stage forwards a chunk as soon as it has it (so stages compute at
the same time), the exit samples, and the loop exit -> stage 0 -> ... -> exit never involves the orchestrator, which
only hears of it. Knows no socket, process or tensor: it is given a node, a mailbox and a worker.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from ppsmoke.cluster.addresses import Address
from ppsmoke.cluster.events import LinkInfo
from ppsmoke.errors import InputError, SmokeError, StageError, WorkerLost
from ppsmoke.pipeline.failures import failure, utf8_safe
from ppsmoke.pipeline.generation import Generation
from ppsmoke.pipeline.intake import Intake, Mailbox
from ppsmoke.pipeline.messages import (
    NO_TOKEN,
    InferenceRequest,
    Message,
    NextToken,
    Reset,
    StageActivation,
    StageStatus,
    encode,
)
from ppsmoke.pipeline.names import stage_name
from ppsmoke.pipeline.operations import STEP_DEADLINE_S, Hidden, Loaded, Operations, Sampled, Worker
from ppsmoke.pipeline.outbox import Outbox
from ppsmoke.waiting import Deadline, running

BUSY_GRACE_S = 1.0  # an answer may overtake the end of its request on the way to stage 0: they travel on two links
RESOLVE_BUDGET_S = 60.0  # spec, section 6: a name resolves within a minute
FLUSH_BUDGET_S = 5.0  # the last words of a stage; the run ends meanwhile anyway


class Post(Protocol):
    """What of a cluster Node a stage needs."""

    async def send(self, to: Address, payload: bytes) -> None: ...

    async def resolve(self, name: str) -> Address: ...


@dataclass
class _Request:
    """A request in the chain, as one stage sees it. cached: its positions that are in this stage's KV cache."""

    request_id: int
    reply_to: str
    max_tokens: int
    prompt_token_ids: tuple[int, ...]
    cached: int = 0
    generation: Generation | None = None  # the exit's


class StageActor:
    """Stage `stage` of `num_stages`: first, middle or last by its index, first and last at once when it is alone.

    `run` serves one request after the other until it is cancelled. A request that cannot be served is reported to the
    orchestrator by StageFailed and the actor lives on; so is a worker that is gone, and then `run` raises WorkerLost
    (on_failed hears of it before anybody else does).
    """

    def __init__(
        self,
        *,
        stage: int,
        num_stages: int,
        worker: Worker,
        post: Post,
        mailbox: Mailbox,
        orchestrator: Address,
        step_deadline_s: float = STEP_DEADLINE_S,
        busy_grace_s: float = BUSY_GRACE_S,
        on_failed: Callable[[Exception], None] = lambda error: None,
        links: Callable[[], Iterable[LinkInfo]] = tuple,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._num_stages = num_stages
        self._is_first = stage == 0
        self._is_exit = stage == num_stages - 1
        self._worker = worker
        self._operations = Operations(worker, stage=stage, deadline_s=step_deadline_s)
        self._post = post
        self._on_failed = on_failed
        self._links = links
        self._clock_s = clock_s
        self._outbox = Outbox(post.send, orchestrator)
        self._intake = Intake(
            mailbox, stage=stage, num_stages=num_stages, busy_grace_s=busy_grace_s, refused=self._report
        )
        self._loaded: Loaded
        self._request: _Request | None = None
        self._at_work = 0  # the request that the newest message was about, until its end
        self._cache_is_empty = True
        self._peers: dict[str, Address] = {}

    async def run(self) -> NoReturn:
        """Serve until cancelled. Raises WorkerLost, or StageError when the worker could not load, after saying so."""
        async with running(self._outbox.run(), name=f"outbox of stage {self._stage}"):
            try:
                await self._load()
                async with (
                    running(self._intake.run(), name=f"receiver of stage {self._stage}"),
                    running(self._mourn(), name=f"worker of stage {self._stage}"),
                    running(self._meet_neighbours(), name=f"neighbours of stage {self._stage}"),
                ):
                    while True:
                        await self._work_on(await self._intake.next())
            except Exception as error:  # the orchestrator hears of our own mistakes too
                self._on_failed(error)
                self._report(self._at_work, error)
                await self._outbox.flush(FLUSH_BUDGET_S)
                raise

    def on_progress(self, line: dict[str, Any]) -> None:
        """Pass a worker's loading line on to the orchestrator; never waits."""
        done, total = (value if type(value := line.get(key)) is int and value >= 0 else 0 for key in ("done", "total"))
        self._status("loading", what=utf8_safe(str(line.get("what", ""))[:200]), done=done, total=total)

    # -- the worker's life

    async def _load(self) -> None:
        ready = await asyncio.shield(self._worker.ready)
        self._loaded = Loaded.parse(ready, stage=self._stage)
        self._status("ready", detail_json=json.dumps(ready, separators=(",", ":")))

    async def _mourn(self) -> NoReturn:
        raise await asyncio.shield(self._worker.lost)

    async def _meet_neighbours(self) -> None:
        """Look up whom we will write to, so that the first message does not wait for a link to be made."""
        for name in self._neighbours():
            with suppress(SmokeError):
                self._peers[name] = await self._post.resolve(name)

    def _neighbours(self) -> list[str]:
        names = [] if self._is_exit else [stage_name(self._stage + 1)]
        return names if self._is_first else [*names, stage_name(0)]

    # -- the work

    async def _work_on(self, message: Message) -> None:
        self._at_work = message.request_id
        try:
            match message:
                case InferenceRequest():
                    await self._begin(message)
                case StageActivation():
                    await self._on_activation(message)
                case NextToken():
                    await self._on_next_token(message)
                case Reset():
                    await self._on_reset(message)
        except WorkerLost:
            raise
        except SmokeError as error:
            await self._give_up(message.request_id, error)

    async def _begin(self, message: InferenceRequest) -> None:
        """Stage 0: tokenise, refuse what cannot fit before any compute, prefill chunk by chunk."""
        if message.max_tokens < 1:
            raise InputError("max_tokens is 0: there is nothing to generate", hint="ask for at least one token")
        tokens = await self._operations.tokenize(message.request_id, message.prompt, raw=message.raw)
        room = self._loaded.context - len(tokens)
        if not tokens:
            raise InputError("the prompt has no tokens", hint="give a prompt, or leave --raw out")
        if room < 1:
            cause = f"the prompt has {len(tokens)} tokens and the context holds {self._loaded.context}"
            raise InputError(f"{cause}, with no room for an answer", hint="shorten the prompt or raise --max-context")
        await self._forget(message.request_id)
        self._turn_to_new_request()
        request = _Request(message.request_id, message.reply_to, min(message.max_tokens, room), tokens)
        if self._is_exit:
            request.generation = self._generation(request, began_s=self._clock_s())
        self._request = request
        for start in range(0, len(tokens), self._loaded.chunk):
            await self._feed(request, tokens[start : start + self._loaded.chunk], is_prefill=True)
        while self._is_exit and self._request is request:  # alone: the loop closes right here
            await self._feed(request, (request.generation.token_ids[-1],), is_prefill=False)

    async def _feed(self, request: _Request, tokens: tuple[int, ...], *, is_prefill: bool) -> None:
        """Stage 0: these tokens through our blocks, and on: to the next stage, or to sampling where we are alone."""
        position = request.cached
        last_chunk = position + len(tokens) >= len(request.prompt_token_ids)
        self._cache_is_empty = False
        if self._is_exit:
            sampled = await self._operations.embed_and_sample(request.request_id, tokens, position, sample=last_chunk)
            request.cached += len(tokens)
            await self._on_sampled(request, sampled, (sampled.compute_us,), last_chunk=last_chunk)
            return
        if is_prefill:
            hidden = await self._operations.embed_and_forward(request.request_id, tokens, position)
        else:
            hidden = await self._operations.decode_step(request.request_id, tokens[0], position)
        request.cached += len(tokens)
        await self._pass_on(request, hidden, position, (), is_prefill=is_prefill, last_chunk=last_chunk)

    async def _on_next_token(self, message: NextToken) -> None:
        """Stage 0: the loop closes here."""
        request = self._request
        if request is None or request.request_id != message.request_id:
            return  # a copy of what is long done
        if message.done:
            await self._end(request.request_id)
        elif message.position > request.cached:
            raise self._gap(message.position, request.cached)
        elif message.position == request.cached:
            await self._feed(request, (message.token_id,), is_prefill=False)

    async def _on_activation(self, message: StageActivation) -> None:
        """A later stage: a chunk or a step of the present request, the beginning of a new one, or a copy of either."""
        request = self._request
        if request is None or request.request_id != message.request_id:
            if self._intake.is_over(message.request_id):
                return
            if message.position != 0:
                raise self._gap(message.position, 0)
            await self._forget(message.request_id)
            request = self._request = self._begun(message)
        elif message.position < request.cached:
            return
        elif message.position > request.cached:
            raise self._gap(message.position, request.cached)
        if message.hidden_dim != self._loaded.hidden_dim:
            widths = f"{message.hidden_dim} wide, this stage's model is {self._loaded.hidden_dim}"
            raise StageError(f"hidden states from stage {self._stage - 1} are {widths}", hint="is it the same model?")
        await self._continue(request, message)

    def _begun(self, message: StageActivation) -> _Request:
        self._turn_to_new_request()
        request = _Request(message.request_id, message.reply_to, message.max_tokens, message.prompt_token_ids)
        if self._is_exit:
            began_s = self._clock_s() - sum(message.compute_us) / 1e6
            request.generation = self._generation(request, began_s=began_s)
        return request

    def _turn_to_new_request(self) -> None:
        self._peers.clear()
        links = [{"to": link.role, "path": link.path, "rtt_ms": link.rtt_ms} for link in self._links()]
        self._status("linked", detail_json=json.dumps(links))

    def _generation(self, request: _Request, *, began_s: float) -> Generation:
        prompt, eog = request.prompt_token_ids, self._loaded.eog
        return Generation(request.request_id, request.reply_to, prompt, request.max_tokens, eog, began_s)

    async def _continue(self, request: _Request, message: StageActivation) -> None:
        """This stage's blocks on the message's positions, in pieces that the worker takes."""
        whole = Hidden(message.hidden, message.dtype, message.seq_len)
        pieces: list[Hidden] = []
        sampled, compute_us = Sampled(0, 0), 0
        self._cache_is_empty = False
        for start in range(0, whole.seq_len, self._loaded.chunk):
            piece = whole.rows(start, start + self._loaded.chunk)
            position = message.position + start
            if self._is_exit:
                sample = message.last_chunk and start + piece.seq_len == whole.seq_len
                sampled = await self._operations.forward_and_sample(request.request_id, piece, position, sample=sample)
                compute_us += sampled.compute_us
            else:
                pieces.append(await self._operations.forward(request.request_id, piece, position))
                compute_us += pieces[-1].compute_us
            request.cached = position + piece.seq_len
        if self._is_exit:
            all_us = (*message.compute_us, compute_us)
            await self._on_sampled(request, sampled, all_us, last_chunk=message.last_chunk)
        else:
            data = b"".join(piece.data for piece in pieces)
            hidden = Hidden(data, pieces[0].dtype, whole.seq_len, compute_us)
            step = {"is_prefill": message.is_prefill, "last_chunk": message.last_chunk}
            await self._pass_on(request, hidden, message.position, message.compute_us, **step)

    async def _pass_on(
        self,
        request: _Request,
        hidden: Hidden,
        position: int,
        earlier_us: tuple[int, ...],
        *,
        is_prefill: bool,
        last_chunk: bool,
    ) -> None:
        first = position == 0
        message = StageActivation(
            request_id=request.request_id,
            position=position,
            seq_len=hidden.seq_len,
            hidden_dim=self._loaded.hidden_dim,
            dtype=hidden.dtype,
            is_prefill=is_prefill,
            last_chunk=last_chunk,
            max_tokens=request.max_tokens if first else 0,
            reply_to=request.reply_to if first else "",
            compute_us=(*earlier_us, hidden.compute_us),
            prompt_token_ids=request.prompt_token_ids if first else (),
            hidden=hidden.data,
        )
        await self._send(stage_name(self._stage + 1), message)
        prompt = len(request.prompt_token_ids)
        if is_prefill:
            self._status("prefill", done=request.cached, total=prompt)
        else:  # as many as the exit will have when it has done its part
            self._status("token", done=request.cached - prompt + 1, total=request.max_tokens)

    async def _on_sampled(
        self, request: _Request, sampled: Sampled, compute_us: tuple[int, ...], *, last_chunk: bool
    ) -> None:
        """The exit: take the token, close the loop, and answer when it was the last. The loop goes first."""
        generation = request.generation
        generation.computed(compute_us)
        if not last_chunk:
            self._status("prefill", done=request.cached, total=len(request.prompt_token_ids))
            return
        finish = generation.sampled(sampled.token_id, self._clock_s())
        if not self._is_first:
            await self._send_next_token(request.request_id, sampled.token_id, request.cached, finish, compute_us)
        count = len(generation.token_ids)
        self._status("token", done=count, total=generation.max_tokens, token_id=sampled.token_id)
        if finish is None:
            return
        text = await self._operations.detokenize(request.request_id, generation.text_token_ids())
        self._outbox.post(generation.response(text), to=Address.parse(request.reply_to))
        if self._is_first:
            await self._end(request.request_id)

    async def _send_next_token(
        self, request_id: int, token_id: int, position: int, finish: str | None, compute_us: tuple[int, ...]
    ) -> None:
        done = finish is not None
        message = NextToken(
            request_id=request_id, token_id=token_id, position=position, done=done, compute_us=compute_us
        )
        await self._send(stage_name(0), message)

    # -- the end of a request

    async def _on_reset(self, message: Reset) -> None:
        if self._request is None or self._request.request_id == message.request_id:
            await self._end(message.request_id)

    async def _end(self, request_id: int) -> None:
        """Forget the request and pass the word down the chain."""
        self._at_work = 0
        self._request = None
        self._intake.end(request_id)
        if not self._is_exit:
            await self._send(stage_name(self._stage + 1), Reset(request_id=request_id))
        await self._forget(request_id)

    async def _forget(self, request_id: int) -> None:
        """Empty the worker's KV cache, unless it is."""
        if not self._cache_is_empty:
            await self._operations.reset(request_id)
            self._cache_is_empty = True

    async def _give_up(self, request_id: int, error: SmokeError) -> None:
        """Report a request that cannot be served here, and free the chain of it; the next one begins with a reset."""
        self._report(request_id, error)
        request, self._request = self._request, None
        self._intake.end(request_id)
        with suppress(SmokeError):  # whoever cannot be told has been lost, and that is being reported by others
            if not self._is_first:
                await self._send_next_token(request_id, 0, 0, "failed", ())
            elif not self._is_exit and request is not None:
                await self._send(stage_name(1), Reset(request_id=request_id))

    def _gap(self, position: int, expected: int) -> StageError:
        cause = f"a message for position {position} came where {expected} was next: one was lost"
        return StageError(cause, phase="ask", stage=self._stage)

    # -- what goes out

    async def _send(self, name: str, message: Message) -> None:
        """To whoever owns the name; looked up anew for each request, since a stage's host may have been replaced."""
        if name not in self._peers:
            deadline = Deadline.after(RESOLVE_BUDGET_S, phase="ask")
            self._peers[name] = await deadline.wait(self._post.resolve(name), doing=f"looking up {name}")
        await self._post.send(self._peers[name], encode(message))

    def _status(self, state: str, *, what: str = "", done: int = 0, total: int = 0, **more: Any) -> None:
        more = {"token_id": NO_TOKEN, **more}
        self._outbox.post(StageStatus(stage=self._stage, state=state, what=what, done=done, total=total, **more))

    def _report(self, request_id: int, error: Exception) -> None:
        self._outbox.post(failure(request_id, error, stage=self._stage))
