"""The run as a story: rent, gather, resolve, load, ask, print, destroy. No HTTP, socket or tensor here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NoReturn

from ppsmoke import models
from ppsmoke.cluster.addresses import Address
from ppsmoke.cluster.events import LinkDown, LinkUp
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.cluster.node import Node
from ppsmoke.errors import DeadlineExceeded, InputError, LinkLost, SmokeError, StageError
from ppsmoke.inbox import Inbox
from ppsmoke.keys import derive
from ppsmoke.package import code_hash
from ppsmoke.pipeline.messages import InferenceRequest, InferenceResponse, Reset, encode
from ppsmoke.pipeline.names import (
    ENTRY_NAME,
    EXIT_NAME,
    ORCHESTRATOR_MAILBOX,
    ORCHESTRATOR_ROLE,
    may_own,
    stage_name,
    stage_role,
)
from ppsmoke.rent.boot import node_secret
from ppsmoke.rent.fleet import Fleet, SpecOf, StageSpec
from ppsmoke.report.progress import Progress
from ppsmoke.settings import Settings
from ppsmoke.waiting import Deadline, cancel_and_reap, running, to_the_end

GATHER_BUDGET_S = 120.0  # spec, section 6: the members see each other within two minutes
RESOLVE_BUDGET_S = 60.0  # spec, section 6: a name resolves within one
LOAD_SILENCE_S = 60.0  # design: loading that makes no progress for so long has failed
ASK_SILENCE_S = 30.0  # design: so long without a step or a chunk is a hang
GIVE_UP_S = 1.0  # to tell stage 0 that a request is given up
LEAVE_S = 90.0  # a stage that nobody ended ends itself so long after the run's budget
LAST_WORDS_S = 1.0  # a stage that fails says why just before its process ends; its words are worth this wait

FleetFactory = Callable[[Progress], Fleet]


async def run(settings: Settings, progress: Progress, open_fleet: FleetFactory, say: Callable[[str], None]) -> None:
    """Ask once and hand the answer's text to `say`. Raises SmokeError, once everything is seen ended or named as left.

    progress.record holds what is known, whether this returns or raises. Spec, section 1.
    """
    deadline = Deadline.after(settings.budget_s)
    async with stages_up(settings, progress, open_fleet, deadline) as pipeline:
        answer = await pipeline.ask(
            settings.prompt, raw=settings.raw, max_tokens=settings.max_tokens, deadline=deadline
        )
        progress.phase("print")
        say(answer.text)


class Pipeline:
    """Stages that are loaded and linked, ready to be asked, one request at a time."""

    def __init__(self, node: Node, entry: Address, inbox: Inbox, progress: Progress, num_stages: int) -> None:
        self._node = node
        self._entry = entry
        self._inbox = inbox
        self._progress = progress
        self._num_stages = num_stages
        self._asked = 0

    async def ask(self, prompt: str, *, raw: bool, max_tokens: int, deadline: Deadline) -> InferenceResponse:
        """The answer, its text never empty. Raises StageError, LinkLost or DeadlineExceeded, and MessageError for
        what fits into no request. Spec, section 3."""
        self._progress.phase("ask")
        self._asked += 1
        deadline = deadline.capped(deadline.remaining(), phase="ask")
        request = InferenceRequest(
            request_id=self._asked,
            reply_to=str(self._node.address(ORCHESTRATOR_MAILBOX)),
            prompt=prompt,
            max_tokens=max_tokens,
            raw=raw,
        )
        encoded = encode(request)
        self._inbox.expect(request.request_id)
        try:
            await deadline.wait(self._node.send(self._entry, encoded), doing="sending the request to pp-entry")
            answer = await self._inbox.answer(deadline, silence_s=ASK_SILENCE_S)
        except DeadlineExceeded:
            await self._give_up(request.request_id)
            raise
        self._progress.record.take_answer(answer)
        self._progress.record.links = self._inbox.links_json(self._node)
        if not answer.text:
            raise StageError(
                f"the answer is empty ({len(answer.token_ids)} tokens, {answer.finish_reason})",
                phase="ask",
                stage=self._num_stages - 1,
                hint="the model ended at once or said nothing printable: try another prompt, or --raw",
            )
        return answer

    async def _give_up(self, request_id: int) -> None:
        """Free the chain for the next request, if the stages still hear us."""
        telling = self._node.send(self._entry, encode(Reset(request_id=request_id)))
        with suppress(SmokeError):
            await Deadline.after(GIVE_UP_S).wait(telling, doing="giving the request up")


@asynccontextmanager
async def stages_up(
    settings: Settings, progress: Progress, open_fleet: FleetFactory, deadline: Deadline
) -> AsyncIterator[Pipeline]:
    """Stages for this block alone, loaded and watched: if one fails, the block is cancelled and the failure raised."""
    model = _as_seen_anywhere(settings.model, settings.num_stages)  # refused, if it must be, before anything is started
    authority = RunAuthority(settings.run_key)
    progress.phase("rent")
    fleet = open_fleet(progress)
    try:
        async with (
            Node.listening(
                authority.mint(ORCHESTRATOR_ROLE),
                cluster_key=derive(settings.run_key, "cluster"),
                tcp=(fleet.listen_host, 0),
                udp=(fleet.listen_host, 0),
                code_hash=code_hash(),
                model=models.fingerprint(settings.model),
                may_own=lambda name, role: may_own(name, role, settings.num_stages),
            ) as node,
            rented(fleet, progress, node),
        ):
            inbox = Inbox(node.mailbox(ORCHESTRATOR_MAILBOX), progress, settings.num_stages)
            async with (
                running(inbox.pump(), name="inbox"),
                running(_pass_on_links(node, fleet), name="pass on links"),
                running(_watch(fleet, inbox), name="watch over stages"),
            ):
                await _rent(settings, node, fleet, specs(settings, model, authority, node), deadline)
                entry = await _gather(settings, node, fleet, inbox, progress, deadline)
                async with running(_watch_links(node, inbox), name="watch over links"):
                    progress.phase("load")
                    loading = deadline.capped(deadline.remaining(), phase="load")
                    await inbox.all_ready(loading, silence_s=LOAD_SILENCE_S)
                    yield Pipeline(node, entry, inbox, progress, settings.num_stages)
    except SmokeError as error:
        error.phase = error.phase or progress.current_phase
        progress.record.error = error
        raise
    finally:
        progress.phase("")


@asynccontextmanager
async def rented(fleet: Fleet, progress: Progress, node: Node) -> AsyncIterator[None]:
    """Machines for this block alone. A failure takes the stage's last words along; then everything is destroyed."""
    try:
        yield
    except SmokeError as error:
        error.phase = error.phase or progress.current_phase
        if slept := node.stood_still():
            error.cause = f"{error.cause}; {slept}"
            error.hint = error.hint or "keep this machine awake while a run goes on"
        fleet.failing(error)
        error.detail = error.detail or await fleet.logs(error.stage)
        raise
    finally:
        # On its own clock, deaf to further signals. DestroyFailed names what is left and outranks what ended the run.
        progress.phase("destroy")
        await to_the_end(fleet.destroy_all(), doing="destroying machines", within_s=fleet.destroy_budget_s)


async def _rent(settings: Settings, node: Node, fleet: Fleet, spec_of: SpecOf, deadline: Deadline) -> None:
    """A machine for each stage. We dial out as they come up: nothing rented ever has to reach the user's home."""
    whole = deadline.capped(deadline.remaining(), phase="")  # an error's phase is the one that the run is in
    dialling = node.gather(
        fleet.endpoints(), size=settings.num_stages + 1, deadline=whole, reach_within_s=fleet.reach_within_s
    )
    async with running(dialling, name="dial stages as they come up"):
        await whole.wait(fleet.rent(settings.num_stages, spec_of, whole), doing="renting machines")


async def _gather(
    settings: Settings, node: Node, fleet: Fleet, inbox: Inbox, progress: Progress, deadline: Deadline
) -> Address:
    """Every stage is a member with a link, and every name resolves; where pp-entry is. Spec, section 3, "Topology"."""
    progress.phase("gather")
    await node.gather(
        fleet.endpoints(),
        size=settings.num_stages + 1,
        deadline=deadline.capped(GATHER_BUDGET_S, phase="gather"),
        reach_within_s=fleet.reach_within_s,
    )
    progress.say(f"{settings.num_stages} stages joined")
    for check in node.port_checks:
        progress.say(str(check))

    progress.phase("resolve")
    stage_names = [stage_name(stage) for stage in range(settings.num_stages)]
    resolving = deadline.capped(RESOLVE_BUDGET_S, phase="resolve")
    addresses = {
        name: await resolving.wait(node.resolve(name), doing=f"looking up {name}")
        for name in (ENTRY_NAME, EXIT_NAME, *stage_names)
    }
    inbox.stage_nodes = {addresses[name].node_id: stage for stage, name in enumerate(stage_names)}
    return addresses[ENTRY_NAME]


async def _watch(fleet: Fleet, inbox: Inbox) -> NoReturn:
    """Raises for a stage that failed, in its own words where it had any left, or whose machine is gone."""
    told, lost = asyncio.ensure_future(inbox.failed()), asyncio.ensure_future(fleet.watch())
    try:
        await asyncio.wait({told, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not told.done():
            await asyncio.wait({told}, timeout=LAST_WORDS_S)
        await (told if told.done() else lost)
    finally:
        await cancel_and_reap(told, lost)


async def _watch_links(node: Node, inbox: Inbox) -> NoReturn:
    """Raises LinkLost for the first stage that is lost, naming it."""
    try:
        return await node.guard(list(inbox.stage_nodes))
    except LinkLost as error:
        error.stage = inbox.stage_nodes.get(error.peer)
        raise


async def _pass_on_links(node: Node, fleet: Fleet) -> NoReturn:
    """Tell the fleet of each link that comes up or goes down."""
    events = node.subscribe()
    while True:
        event = await events.get()
        if isinstance(event, LinkUp | LinkDown):
            fleet.link_changed(event.peer, up=isinstance(event, LinkUp))


def specs(settings: Settings, model: str, authority: RunAuthority, node: Node) -> SpecOf:
    """A spec for each stage and generation: identity and environment (design, "Environment of a stage node")."""
    lifetime_s = settings.lifetime_s or settings.budget_s + LEAVE_S

    def spec_of(stage: int, generation: int) -> StageSpec:
        identity = authority.mint(stage_role(stage, settings.num_stages), generation)
        environment = {
            "STAGE": str(stage),
            "NUM_STAGES": str(settings.num_stages),
            "SEED_ADDR": node.node_id,  # no host: the stage waits to be dialled
            "MODEL": model,
            "PPSMOKE_NODE_RUN_ID": settings.run_id,
            "PPSMOKE_NODE_LEAF_KEY": identity.leaf_key.hex(),
            "PPSMOKE_NODE_CLUSTER_KEY": derive(settings.run_key, "cluster").hex(),
            "PPSMOKE_NODE_GENERATION": str(generation),
            "PPSMOKE_NODE_LIFETIME_S": f"{lifetime_s:.0f}",
            "PPSMOKE_NODE_MAX_CONTEXT": str(settings.max_context),
            "PPSMOKE_NODE_WIRE_DTYPE": settings.wire_dtype,
            "PPSMOKE_NODE_DEVICE": settings.device,
        }
        return StageSpec(
            stage=stage,
            generation=generation,
            identity=identity,
            environment=environment,
            boot_secret=node_secret(settings.run_key, stage, generation),
        )

    return spec_of


def _as_seen_anywhere(model: str, num_stages: int) -> str:
    """The model's reference, a path made absolute. Raises InputError for what is neither path, name nor URL,
    and for more stages than a known model has blocks."""
    resolved = models.resolve(model)
    if isinstance(resolved, models.Model) and num_stages > resolved.blocks:
        raise InputError(
            f"{num_stages} stages for a model of {resolved.blocks} blocks", hint=f"try --stages {resolved.blocks}"
        )
    return str(resolved.resolve()) if isinstance(resolved, Path) else model
