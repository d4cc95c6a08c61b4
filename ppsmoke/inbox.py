"""The orchestrator's mailbox, read: which stages are loading or ready, what failed, when something last moved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from ppsmoke.cluster.mailbox import Mailbox
from ppsmoke.cluster.node import Node
from ppsmoke.errors import DeadlineExceeded, MessageError, StageError
from ppsmoke.pipeline.messages import InferenceResponse, Message, StageFailed, StageStatus, decode
from ppsmoke.pipeline.names import stage_role
from ppsmoke.report.progress import Progress
from ppsmoke.report.told import link_json, links_of, ready_of
from ppsmoke.waiting import Deadline

MAX_REFUSED_TOLD = 5  # a stage that lies may do so a thousand times a second
OWN_LAG_S = 2.0  # a wait that takes so much longer than asked: we were stopped, not they
STILL_SHARE = 3  # a third of the silence that is a hang: by then a stage stands still
MAY_BE_FROZEN = "its machine may be frozen or overloaded; -v shows all that it printed"


class Inbox:
    """pump() reads; the others wait for what it has read. Times are of the monotonic clock."""

    def __init__(self, mailbox: Mailbox, progress: Progress, num_stages: int) -> None:
        self.stage_nodes: dict[str, int] = {}
        self._done: dict[int, tuple[bool, int]] = {}  # of the present request: (past its prefill, how many)
        self._links: dict[int, list[dict[str, Any]]] = {}
        self.refused = 0  # messages that do not decode, or were not their sender's to say
        self._mailbox = mailbox
        self._progress = progress
        self._num_stages = num_stages
        self._moved = asyncio.Event()  # set at every message, cleared by who waits
        self._moved_at = time.monotonic()
        self._heard: dict[int, tuple[float, str]] = {}
        self._failure: asyncio.Future[StageError] = asyncio.get_running_loop().create_future()
        self._expected = 0
        self._answer: InferenceResponse | None = None
        self._refusal: StageError | None = None

    async def pump(self) -> NoReturn:
        """Read messages for ever. One that does not decode is a line in the log, no failure."""
        while True:
            delivery = await self._mailbox.receive()
            try:
                message = decode(delivery.payload)
            except MessageError as error:
                self._refuse(f"a message from {delivery.sender_role}: {error}")
                continue
            if self._may_say(delivery.sender_role, message):
                self._take(message, delivery.sender_role)
            else:
                self._refuse(f"{_what(message)} from {delivery.sender_role}, which is another's to say")

    def _refuse(self, what: str) -> None:
        self.refused += 1
        if self.refused <= MAX_REFUSED_TOLD:
            self._progress.say(f"ignored {what}")

    def _may_say(self, role: str, message: Message) -> bool:
        """A stage speaks for itself alone, and the last one answers: the role is the one in its certificate."""
        match message:
            case StageStatus(stage=stage) | StageFailed(stage=stage):
                return stage < self._num_stages and role == stage_role(stage, self._num_stages)
            case InferenceResponse():
                return role == stage_role(self._num_stages - 1, self._num_stages)
        return True  # not expected from anybody, which _take says

    def _take(self, message: Message, sender_role: str) -> None:
        match message:
            case StageStatus():
                self._take_status(message)
            case StageFailed(request_id=request_id) if request_id and request_id == self._expected:
                self._refusal = _error_of(message)
            case StageFailed():
                if not self._failure.done():
                    self._failure.set_result(_error_of(message))
            case InferenceResponse(request_id=request_id) if request_id == self._expected:
                self._answer = message
            case _:
                self._progress.detail(f"{type(message).__name__} from {sender_role} was not expected")
                return
        self._moved_at = time.monotonic()
        self._moved.set()

    def _take_status(self, status: StageStatus) -> None:
        self._heard[status.stage] = (time.monotonic(), status.what or status.state)
        if status.state in ("prefill", "token"):
            # Positions computed: all of the prompt's come before the first token, which the exit alone counts apart.
            self._done[status.stage] = (status.state == "token", status.done)
        match status.state:
            case "loading":
                self._progress.loading(status.stage, status.what, status.done, status.total)
            case "ready":
                ready = ready_of(status.detail_json)
                self._progress.record.stage_info[status.stage] = ready
                self._progress.say(_ready_line(ready), stage=status.stage)
            case "linked":
                self._links[status.stage] = links_of(status.detail_json)
            case _:
                self._progress.detail(
                    f"stage {status.stage}: {status.state} {status.what} {status.done}/{status.total}"
                )

    async def failed(self) -> NoReturn:
        """Raises what a stage said of a failure that is not the expected request's alone."""
        raise await asyncio.shield(self._failure)

    async def all_ready(self, deadline: Deadline, *, silence_s: float) -> None:
        """Every stage said `ready`, and they read the same model. Raises DeadlineExceeded, StageError."""
        info = self._progress.record.stage_info
        await self._until(lambda: len(info) == self._num_stages, deadline, silence_s, "waiting for stages to load")
        prints = {stage: ready.get("fingerprint") for stage, ready in info.items()}
        if len(set(prints.values())) > 1:
            raise StageError(
                "the stages read different model files: "
                + ", ".join(f"stage {stage} {str(value)[:12]}" for stage, value in sorted(prints.items())),
                phase="load",
                hint="the source changed meanwhile, or a cache is stale: run `ppsmoke cache clear`",
            )

    def expect(self, request_id: int) -> None:
        """The next answer is to this request; an older one's is ignored."""
        self._expected, self._answer, self._refusal = request_id, None, None
        self._done.clear()
        self._moved_at = time.monotonic()

    async def answer(self, deadline: Deadline, *, silence_s: float) -> InferenceResponse:
        """The expected answer. Raises StageError where a stage refused or failed it; DeadlineExceeded, also after
        silence_s in which no stage finished a step."""

        def settled() -> bool:
            return self._answer is not None or self._refusal is not None

        await self._until(settled, deadline, silence_s, "waiting for the answer")
        if self._refusal is not None:
            raise self._refusal
        return self._answer

    async def _until(self, reached, deadline: Deadline, silence_s: float, doing: str) -> None:
        while not reached():
            self._moved.clear()
            quiet_for = time.monotonic() - self._moved_at
            if deadline.remaining() <= 0:
                still = quiet_for >= silence_s / STILL_SHARE  # more time would not have helped much
                raise deadline.expired(
                    f"{doing} ({self._last_heard()})",
                    stage=self._stuck() if still else None,
                    hint=f"nothing has moved for {quiet_for:.0f} s: {MAY_BE_FROZEN}" if still else "",
                )
            if quiet_for >= silence_s:
                raise DeadlineExceeded(
                    f"{doing}: nothing has moved for {silence_s:g} s ({self._last_heard()})",
                    phase=deadline.phase,
                    stage=self._stuck(),
                    hint=MAY_BE_FROZEN,
                )
            await self._wait_for_a_move(min(deadline.remaining(), silence_s - quiet_for))

    async def _wait_for_a_move(self, at_most_s: float) -> None:
        """After this process itself stood still (Ctrl-Z, a closed lid) the silence is counted anew."""
        until = time.monotonic() + at_most_s
        wait = asyncio.ensure_future(self._moved.wait())
        try:
            await asyncio.wait({wait}, timeout=at_most_s)
        finally:
            wait.cancel()
        if time.monotonic() - until > OWN_LAG_S:
            self._moved_at = time.monotonic()

    def _stuck(self) -> int | None:
        """The stage whose turn it is: never heard; still loading, the longest without a word; or the first in the chain
        that has not done what the one before it has."""
        heard, stages = self._heard, range(self._num_stages)
        silent = [stage for stage in stages if stage not in heard]
        loading = [stage for stage in stages if stage not in self._progress.record.stage_info]
        if silent or loading:
            return silent[0] if silent else min(loading, key=lambda stage: heard[stage][0])
        done = [self._done.get(stage, (False, 0)) for stage in stages]
        behind = [stage for stage in stages[1:] if done[stage] < done[stage - 1]]
        return behind[0] if behind else 0

    def _last_heard(self) -> str:
        now = time.monotonic()
        parts = [
            f"stage {stage} {now - self._heard[stage][0]:.0f} s ago ({self._heard[stage][1]})"
            if stage in self._heard
            else f"stage {stage} never"
            for stage in range(self._num_stages)
        ]
        return "last heard: " + ", ".join(parts)

    def links_json(self, node: Node) -> list[dict[str, Any]]:
        """Each link once, as `--json` shows it: our own, then what the stages told of theirs when they were made."""
        own = [{"from": node.role, **link_json(link.role, link.path, link.rtt_ms)} for link in node.links()]
        seen = {frozenset((link["from"], link["to"])) for link in own}
        for stage in sorted(self._links):
            for link in self._links[stage]:
                link = {"from": stage_role(stage, self._num_stages), **link}
                if frozenset((link["from"], link["to"])) not in seen:
                    seen.add(frozenset((link["from"], link["to"])))
                    own.append(link)
        return own


def _ready_line(ready: Mapping[str, Any]) -> str:
    """ "ready: blocks 0 to 15 of 30 on CPU, 325 MB of weights, loaded in 1.1 s, warmed up in 3.0 s"."""
    blocks = ready.get("blocks") or ["?", "?"]
    weights = (ready.get("weight_bytes") or 0) / 1e6
    return (
        f"ready: blocks {blocks[0]} to {blocks[-1]} of {ready.get('total_blocks')} on {ready.get('device')}, "
        f"{weights:.0f} MB of weights, loaded in {ready.get('load_s') or 0:.1f} s, "
        f"warmed up in {ready.get('warmup_s') or 0:.1f} s"
    )


def _what(message: Message) -> str:
    of = f" of stage {message.stage}" if isinstance(message, (StageStatus, StageFailed)) else ""
    return f"{type(message).__name__}{of}"


def _error_of(message: StageFailed) -> StageError:
    return StageError(message.cause, phase=message.phase, stage=message.stage, hint=message.hint, detail=message.detail)
