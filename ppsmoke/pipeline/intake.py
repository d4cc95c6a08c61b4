"""A stage's way in: messages decoded, judged by who sent them, and one request at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Protocol

from ppsmoke.cluster.addresses import Delivery
from ppsmoke.errors import MessageError, SmokeError, StageError
from ppsmoke.pipeline.messages import InferenceRequest, Message, NextToken, Reset, StageActivation, decode
from ppsmoke.pipeline.names import ORCHESTRATOR_ROLE, stage_role

MAX_WAITING_MESSAGES = 256  # decoded and not yet worked on; beyond it the link's window fills and the sender waits
REMEMBERED_REQUESTS = 256  # ids of requests that are over; a copy of a message is never older than that

MAX_UNWELCOME_TOLD = 5  # a member that lies may do so a thousand times a second

log = logging.getLogger(__name__)


class Mailbox(Protocol):
    """Where a stage's messages arrive, each once and in its sender's order."""

    async def receive(self) -> Delivery: ...


class Intake:
    """The messages that stage `stage` is to work on, in order. `run` fills it from the mailbox.

    refused(request_id, error) is called for what can be answered without work: bytes that are no message, and a
    request that comes while another has the chain and is still there after busy_grace_s.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        *,
        stage: int,
        num_stages: int,
        busy_grace_s: float,
        refused: Callable[[int, SmokeError], None],
    ) -> None:
        self.unwelcome = 0  # messages that were not their sender's to send
        self._mailbox = mailbox
        self._stage = stage
        self._roles = [stage_role(index, num_stages) for index in range(num_stages)]
        self._busy_grace_s = busy_grace_s
        self._refused = refused
        self._waiting: asyncio.Queue[Message] = asyncio.Queue(MAX_WAITING_MESSAGES)
        self._over: deque[int] = deque(maxlen=REMEMBERED_REQUESTS)
        self._admitted: int | None = None  # stage 0: the request that has the chain
        self._held: InferenceRequest | None = None  # stage 0: one that came while the chain was taken
        self._next_up: InferenceRequest | None = None

    async def run(self) -> NoReturn:
        """Receive until cancelled."""
        while True:
            delivery = await self._mailbox.receive()
            try:
                message = decode(delivery.payload)
            except MessageError as error:
                self._refused(0, error)
                continue
            if not self._may_say(delivery.sender_role, message):
                self.unwelcome += 1
                if self.unwelcome <= MAX_UNWELCOME_TOLD:
                    what, sender = type(message).__name__, delivery.sender_role
                    log.warning("%s may not send %s to stage %d", sender, what, self._stage)
            elif not isinstance(message, InferenceRequest) or self._admit(message):
                await self._waiting.put(message)

    async def next(self) -> Message:
        """The next message to work on."""
        if self._next_up is not None:
            message, self._next_up = self._next_up, None
            return message
        return await self._waiting.get()

    def is_over(self, request_id: int) -> bool:
        """Whether this request was ended here, so that what still comes of it is a copy or a straggler."""
        return request_id in self._over

    def end(self, request_id: int) -> None:
        """The request is over; the one that was held for it, if any, is next."""
        self._over.append(request_id)
        if self._admitted == request_id:
            held, self._admitted, self._held = self._held, None, None
            if held is not None:
                self._admitted, self._next_up = held.request_id, held

    def _may_say(self, role: str, message: Message) -> bool:
        """Whether this message is for us, and its sender's certificate names the stage that sends it."""
        match message:
            case InferenceRequest():
                return self._stage == 0 and role == ORCHESTRATOR_ROLE
            case StageActivation():
                return self._stage > 0 and role == self._roles[self._stage - 1]
            case Reset():
                return role == (self._roles[self._stage - 1] if self._stage > 0 else ORCHESTRATOR_ROLE)
            case NextToken():
                return self._stage == 0 and (role == self._roles[-1] or (message.done and role in self._roles))
        return False

    def _admit(self, message: InferenceRequest) -> bool:
        """A second request may wait a moment for the end of the first, whose answer can overtake it: two links."""
        held_id = self._held.request_id if self._held else None
        if message.request_id in (self._admitted, held_id) or self.is_over(message.request_id):
            return False
        if self._admitted is None:
            self._admitted = message.request_id
            return True
        if self._held is None:
            self._held = message
            asyncio.get_running_loop().call_later(self._busy_grace_s, self._give_up_holding, message)
        else:
            self._refuse(message)
        return False

    def _give_up_holding(self, message: InferenceRequest) -> None:
        if self._held is message:
            self._held = None
            self._refuse(message)

    def _refuse(self, message: InferenceRequest) -> None:
        self._over.append(message.request_id)
        cause = f"the stages are at work on request {self._admitted}, one at a time"
        hint = "ask again when its answer is here"
        self._refused(message.request_id, StageError(cause, phase="ask", stage=self._stage, hint=hint))
