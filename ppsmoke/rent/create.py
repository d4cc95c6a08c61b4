"""One instance from one offer, and never an instance that nobody knows of.

Intent, call and outcome are one piece that no cancellation cuts; a create is sent once; after an unclear outcome the
account is searched for the label, several times, and what is found is adopted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppsmoke.errors import RentError
from ppsmoke.rent.labels import MAX_LABEL_CHARS, Label
from ppsmoke.rent.ledger import Entry, Journal
from ppsmoke.rent.shapes import Offer
from ppsmoke.rent.vast_api import CREATE_EXCHANGE_S, THREAD_GRACE_S, VastApi
from ppsmoke.rent.verdicts import (
    Created,
    CreatedAnyway,
    CreateOutcome,
    CreateRefused,
    OfferLost,
    TooOften,
    Unclear,
    VastError,
)
from ppsmoke.waiting import to_the_end

LOOKUP_AT_S = (1.0, 4.0, 9.0, 16.0, 25.0, 35.0)  # after an unclear outcome: the list may lag behind a create
MAX_TOO_OFTEN = 5  # definite 429s in a row before a create gives up
# Documented limits (facts, section 3): one value of env, all of env, and args with onstart ("stay under 4048").
MAX_ENV_VALUE_CHARS, MAX_ENV_CHARS, MAX_COMMAND_BYTES = 256, 32768, 4048
_PORT_KEY = re.compile(r"-p [0-9]{1,5}:[0-9]{1,5}(/udp)?")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What to start on an offer, in runtype `args`: `entrypoint` is one executable, `args` its arguments. `ports` are
    container ports such as "7070/tcp"; the public ones are the host's choice."""

    image: str
    disk_gb: float
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # holds the stage's secrets
    ports: tuple[str, ...] = ()
    entrypoint: str | None = None
    args: tuple[str, ...] = ()

    def to_body(self, label: str) -> dict[str, Any]:
        """The body of a create call, field by field what the official client sends for the same. Raises ValueError for
        what the service would cut, ignore or refuse."""
        env = dict(self.env)
        for port in self.ports:
            number, _, protocol = port.partition("/")
            env[f"-p {number}:{number}" + ("/udp" if protocol == "udp" else "")] = "1"
        self._check(env, label)
        return {
            "client_id": "me",
            "image": self.image,
            "env": env,
            "price": None,  # any number would make this an interruptible bid
            "disk": float(self.disk_gb),
            "label": label,
            "extra": None,
            "onstart": self.entrypoint,  # in runtype args it replaces the ENTRYPOINT
            "image_login": None,
            "python_utf8": False,
            "lang_utf8": False,
            "use_jupyter_lab": False,
            "jupyter_dir": None,
            "force": False,
            "cancel_unavail": True,  # fail rather than leave a stopped instance whose storage is billed
            "template_hash_id": None,
            "user": None,
            "runtype": "args",
            "args": list(self.args),
        }

    def _check(self, env: Mapping[str, str], label: str) -> None:
        command = len("".join((self.entrypoint or "", *self.args)).encode())
        if command > MAX_COMMAND_BYTES:
            raise ValueError(f"a start command of {command} bytes; the service takes {MAX_COMMAND_BYTES}")
        if self.entrypoint is not None and (not self.entrypoint or any(char.isspace() for char in self.entrypoint)):
            raise ValueError("an entrypoint is one executable, not a shell line")
        for name, value in env.items():
            if name.startswith("-") and not _PORT_KEY.fullmatch(name):
                raise ValueError(f"not a port mapping: {name!r}")
            if len(value) > MAX_ENV_VALUE_CHARS:
                raise ValueError(f"{name} has {len(value)} characters; the service takes {MAX_ENV_VALUE_CHARS}")
        if sum(len(name) + len(value) for name, value in env.items()) > MAX_ENV_CHARS:
            raise ValueError(f"an environment of more than {MAX_ENV_CHARS} characters")
        if len(label) > MAX_LABEL_CHARS:
            raise ValueError(f"a label of {len(label)} characters")


@dataclass(frozen=True)
class Rented:
    """An instance of ours, in the journal as created."""

    instance_id: int
    label: str
    offer: Offer


class Creator:
    """Creates a run's instances. One journal, one account; several `create` may run at once.

    strays: the labels under which there is, or may yet appear, an instance that is no stage's: a create that failed
    has made it, or its outcome was unclear and nobody looks for it any more."""

    def __init__(
        self,
        api: VastApi,
        journal: Journal,
        *,
        run_id: str,
        account: str,
        expires_at: float,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._api = api
        self._clock = api.clock
        self._journal = journal
        self._run_id = run_id
        self._account = account
        self._expires_at = expires_at
        self._say = say
        self.strays: set[str] = set()

    async def create(self, offer: Offer, machine: Callable[[str], Machine], *, stage: int) -> Rented | OfferLost:
        """An instance on this offer, or why another offer must be taken. `machine` gets the label.

        Raises VastError where no offer would do (key, money, our own request), LedgerError where nothing could be
        written. Cancelled: the journal holds the outcome, or an open intent that `end_run` looks up."""
        for attempt in range(1, MAX_TOO_OFTEN + 1):
            await self._api.create_turn()
            label = str(Label.fresh(self._run_id, stage, expires_at=self._expires_at))
            body = machine(label).to_body(label)
            outcome = await to_the_end(
                self._send(offer, body, label, stage),
                doing=f"creating an instance for stage {stage}",
                within_s=CREATE_EXCHANGE_S + 2 * THREAD_GRACE_S,
            )
            if isinstance(outcome, TooOften):
                self._api.create_refused_too_often(outcome, attempt)
                continue
            return await self._settle(outcome, offer, label, stage)
        raise RentError(f"the API refused {MAX_TOO_OFTEN} creates in a row as too frequent", phase="rent", stage=stage)

    async def _send(self, offer: Offer, body: dict[str, Any], label: str, stage: int) -> CreateOutcome:
        """Intent, call, record. Runs to its end whatever is cancelled around it."""
        self._journal.intent(
            Entry(
                label=label,
                state="intent",
                stage=stage,
                account=self._account,
                offer_id=offer.id,
                machine_id=offer.machine_id,
                dph=offer.dph_total,
                intent_at=self._clock.wall(),
            )
        )
        outcome = await self._api.create(offer.id, body)
        at = self._clock.wall()
        match outcome:
            case Created(instance_id=instance_id):
                self._journal.created(label, instance_id, at=at)
            case CreatedAnyway(instance_id=instance_id):
                self._journal.created(label, instance_id, at=at, why="made by a create that failed")
            case OfferLost(text=text) | TooOften(text=text):
                self._journal.refused(label, text, at=at)
            case CreateRefused(error=error):
                self._journal.refused(label, error.cause, at=at)
            case Unclear():
                pass  # the intent stays open
        return outcome

    async def _settle(self, outcome: CreateOutcome, offer: Offer, label: str, stage: int) -> Rented | OfferLost:
        """What the outcome means for the run."""
        if isinstance(outcome, Unclear):
            self._say(f"stage {stage}: unclear whether offer {offer.id} was rented ({outcome.text}); looking for it")
            found = await self._look_up(label)
            if found is None:  # the entry stays open: should it appear in spite of that, it is ended
                self.strays.add(label)
                return OfferLost(f"no instance appeared after an unclear create: {outcome.text}")
            self._journal.created(label, found, at=self._clock.wall(), why="found by its label")
            return Rented(found, label, offer)
        if isinstance(outcome, Created):
            return Rented(outcome.instance_id, label, offer)
        if isinstance(outcome, CreatedAnyway):
            self.strays.add(label)
        refusal = outcome.because if isinstance(outcome, CreatedAnyway) else outcome
        if isinstance(refusal, CreateRefused):
            refusal.error.stage = stage
            raise refusal.error
        return refusal

    async def _look_up(self, label: str) -> int | None:
        """The id under this label, None if none appeared in time. A list that fails is one look less, never a no."""
        since = self._clock.now()
        for at_s in LOOKUP_AT_S:
            await self._clock.sleep(max(0.0, since + at_s - self._clock.now()))
            try:
                listing = await self._api.instances(within_s=15.0)
            except VastError as error:
                self._say(f"could not list instances: {error.cause}")
                continue
            for instance in listing.instances:
                if instance.label == label:
                    return instance.id
        return None
