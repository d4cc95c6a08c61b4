"""A stage's way in: what is not its sender's to send is not worked on."""

from __future__ import annotations

import asyncio

import pytest

from ppsmoke.cluster.addresses import Delivery
from ppsmoke.cluster.mailbox import Mailbox
from ppsmoke.errors import SmokeError
from ppsmoke.pipeline.intake import MAX_UNWELCOME_TOLD, Intake
from ppsmoke.pipeline.messages import InferenceRequest, NextToken, Reset, StageActivation, encode
from ppsmoke.waiting import Deadline, running

ROLES = ("orchestrator", "stage-0-of-3", "stage-1-of-3", "stage-2-of-3", "stage-0-of-2")
REPLY_TO = "00112233445566aa/orchestrator"
REQUEST = InferenceRequest(request_id=1, max_tokens=9, raw=False, reply_to=REPLY_TO, prompt="hi")
ACTIVATION = StageActivation(
    request_id=1, position=5, seq_len=1, hidden_dim=1, dtype="float32", is_prefill=False, last_chunk=True, max_tokens=0,
    hidden=bytes(4),
)  # fmt: skip
TOKEN = NextToken(request_id=1, token_id=4, position=5, done=False)
DONE = NextToken(request_id=1, token_id=4, position=5, done=True)


@pytest.mark.parametrize(
    ("stage", "message", "senders"),
    [
        (0, REQUEST, {"orchestrator"}),
        (0, TOKEN, {"stage-2-of-3"}),
        (0, DONE, {"stage-0-of-3", "stage-1-of-3", "stage-2-of-3"}),
        (0, ACTIVATION, set()),
        (1, ACTIVATION, {"stage-0-of-3"}),
        (2, ACTIVATION, {"stage-1-of-3"}),
        (2, Reset(request_id=1), {"stage-1-of-3"}),
        (1, REQUEST, set()),
        (1, TOKEN, set()),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else f"stage {value}",
)
def test_what_is_not_its_senders_to_send_is_not_worked_on(stage, message, senders, caplog):
    async def welcome(role: str) -> tuple[bool, int]:
        mailbox = Mailbox("stage")
        errors: list[SmokeError] = []
        intake = Intake(
            mailbox, stage=stage, num_stages=3, busy_grace_s=9.0, refused=lambda request, error: errors.append(error)
        )
        async with running(intake.run(), name="intake"):
            mailbox.put(Delivery("0" * 16, role, encode(message)))
            while len(mailbox) or (intake._waiting.empty() and not intake.unwelcome):
                await asyncio.sleep(0)
        assert not errors
        return not intake._waiting.empty(), intake.unwelcome

    async def scene() -> None:
        for role in ROLES:
            assert await welcome(role) == (role in senders, role not in senders), role

    asyncio.run(Deadline.after(20).wait(scene(), doing="all roles"))


def test_a_flood_of_what_nobody_may_send_is_a_few_lines_and_then_a_count(caplog):
    async def scene() -> None:
        mailbox = Mailbox("stage")
        intake = Intake(mailbox, stage=0, num_stages=3, busy_grace_s=9.0, refused=lambda request, error: None)
        async with running(intake.run(), name="intake"):
            for _ in range(500):
                mailbox.put(Delivery("0" * 16, "stage-1-of-3", encode(REQUEST)))
            while intake.unwelcome < 500:
                await asyncio.sleep(0)

    asyncio.run(Deadline.after(20).wait(scene(), doing="the flood"))
    assert len([record for record in caplog.records if "may not send" in record.getMessage()]) == MAX_UNWELCOME_TOLD
