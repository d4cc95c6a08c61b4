"""What the orchestrator makes of its mailbox: readiness, refusals, failures, and a silence that is not waited out."""

import asyncio
import io
import json
import time
from types import SimpleNamespace

import pytest

from ppsmoke.cluster.addresses import Delivery
from ppsmoke.cluster.mailbox import Mailbox
from ppsmoke.errors import DeadlineExceeded, StageError
from ppsmoke.inbox import Inbox
from ppsmoke.pipeline.messages import InferenceResponse, StageFailed, StageStatus, encode
from ppsmoke.report.progress import Progress
from ppsmoke.report.summary import RunRecord
from ppsmoke.report.told import MAX_TOLD
from ppsmoke.waiting import Deadline, running

ANSWER = InferenceResponse(request_id=1, finish_reason="stop", token_ids=(5, 2), prompt_token_ids=(1,), text="Hi")


class Desk:
    """An inbox, its mailbox, and what was said on the way."""

    def __init__(self, stages: int = 2) -> None:
        self.stream = io.StringIO()
        self.record = RunRecord(run_id="r", model_name="m", num_stages=stages)
        self.mailbox = Mailbox("orchestrator")
        self.inbox = Inbox(self.mailbox, Progress(self.record, stream=self.stream, verbosity=1), stages)

    def deliver(self, message, role: str = "") -> None:
        """From the stage that may say it, unless it is said to be another."""
        payload = message if isinstance(message, bytes) else encode(message)
        role = role or f"stage-{getattr(message, 'stage', 1)}-of-2"
        self.mailbox.put(Delivery("0" * 16, role, payload))

    def status(self, stage: int, state: str, **more) -> None:
        fields = {"done": 0, "total": 0, "token_id": -1, **more}
        self.deliver(StageStatus(stage=stage, state=state, **fields))


def run(story) -> Desk:
    async def with_desk():
        desk = Desk()
        async with running(desk.inbox.pump(), name="pump"):
            await story(desk)
        return desk

    return asyncio.run(with_desk())


def ready(fingerprint: str) -> str:
    return json.dumps({"fingerprint": fingerprint, "blocks": [0, 3], "total_blocks": 6, "device": "CPU"})


def test_all_are_ready_when_each_has_said_so_and_the_record_has_their_words():
    async def story(desk):
        desk.status(0, "loading", what="block 1", done=1_000_000, total=9_000_000)
        desk.status(0, "ready", detail_json=ready("aa"))
        desk.status(1, "ready", detail_json=ready("aa"))
        await desk.inbox.all_ready(Deadline.after(5, phase="load"), silence_s=5)

    desk = run(story)
    assert desk.record.stage_info[1]["blocks"] == [0, 3]
    assert "stage 0: block 1, 1.0 of 9.0 MB" in desk.stream.getvalue()


def test_stages_that_read_different_files_are_told_apart_before_a_wrong_answer_can_come_of_it():
    async def story(desk):
        desk.status(0, "ready", detail_json=ready("aa"))
        desk.status(1, "ready", detail_json=ready("bb"))
        with pytest.raises(StageError, match="different model files: stage 0 aa, stage 1 bb"):
            await desk.inbox.all_ready(Deadline.after(5, phase="load"), silence_s=5)

    run(story)


def test_a_silence_ends_the_wait_and_names_the_stage_that_was_never_heard():
    async def story(desk):
        desk.status(0, "loading", what="block 1", done=1, total=9)
        with pytest.raises(DeadlineExceeded) as caught:
            await desk.inbox.all_ready(Deadline.after(5, phase="load"), silence_s=0.05)
        assert caught.value.stage == 1 and "nothing has moved for 0.05 s" in caught.value.cause
        assert "stage 0 0 s ago (block 1), stage 1 never" in caught.value.cause

    run(story)


def test_the_runs_own_deadline_counts_although_stages_keep_talking():
    async def story(desk):
        async def talk():
            while True:
                desk.status(0, "loading", what="block 1", done=1, total=9)
                await asyncio.sleep(0.005)

        async with running(talk(), name="talk"):
            with pytest.raises(DeadlineExceeded, match="waiting for stages to load .*0.1 s spent"):
                await desk.inbox.all_ready(Deadline.after(0.1, phase="load"), silence_s=5)

    run(story)


def test_the_expected_answer_is_given_and_an_older_requests_is_not():
    async def story(desk):
        desk.inbox.expect(1)
        desk.deliver(InferenceResponse(**{**vars(ANSWER), "request_id": 9}))
        desk.deliver(ANSWER)
        assert (await desk.inbox.answer(Deadline.after(5), silence_s=5)).request_id == 1

    run(story)


def test_a_refused_request_fails_alone_and_a_failed_stage_fails_the_run():
    async def story(desk):
        desk.inbox.expect(1)
        desk.deliver(StageFailed(request_id=1, stage=0, phase="ask", cause="the prompt is too long", hint="shorten it"))
        with pytest.raises(StageError, match="stage 0: the prompt is too long"):
            await desk.inbox.answer(Deadline.after(5), silence_s=5)
        failed = asyncio.ensure_future(desk.inbox.failed())
        await asyncio.sleep(0)
        assert not failed.done()
        desk.deliver(StageFailed(request_id=0, stage=1, phase="load", cause="no clang", hint="install it", detail="d"))
        with pytest.raises(StageError) as caught:
            await failed
        assert (caught.value.stage, caught.value.phase, caught.value.hint) == (1, "load", "install it")

    run(story)


def test_garbage_in_the_mailbox_is_a_line_and_the_reading_goes_on():
    async def story(desk):
        desk.inbox.expect(1)
        desk.deliver(b"\xff\xff", role="stage-1-of-2")
        desk.deliver(ANSWER)
        await desk.inbox.answer(Deadline.after(5), silence_s=5)

    assert "ignored a message from stage-1-of-2" in run(story).stream.getvalue()


def test_each_link_is_told_once_and_odd_tales_of_links_are_left_out():
    async def story(desk):
        links = [{"to": "stage-1-of-2", "path": "direct", "rtt_ms": 1.23456}, "nonsense"]
        desk.status(0, "linked", detail_json=json.dumps(links))
        desk.status(1, "linked", detail_json=json.dumps([{"to": "stage-0-of-2", "path": "direct", "rtt_ms": None}]))
        desk.inbox.expect(1)
        desk.deliver(ANSWER)
        await desk.inbox.answer(Deadline.after(5), silence_s=5)
        own = SimpleNamespace(role="stage-0-of-2", path="relayed", rtt_ms=None)
        node = SimpleNamespace(role="orchestrator", links=lambda: [own])
        assert desk.inbox.links_json(node) == [
            {"from": "orchestrator", "to": "stage-0-of-2", "path": "relayed", "rtt_ms": None},
            {"from": "stage-0-of-2", "to": "stage-1-of-2", "path": "direct", "rtt_ms": 1.235},
        ]

    run(story)


def test_the_stage_whose_turn_it_was_is_blamed_for_a_silence_in_mid_decode():
    async def story(desk):
        for stage in (0, 1):
            desk.status(stage, "ready", detail_json=ready("aa"))
        for last_word, blamed in ((("prefill", 28), 1), (("token", 2), 1), (None, 0)):
            desk.inbox.expect(1)
            desk.status(0, "prefill", done=28, total=28)
            if last_word != ("prefill", 28):
                desk.status(1, "token", done=1, total=9, token_id=5)
            if last_word is not None:
                desk.status(0, last_word[0], done=last_word[1], total=9)
            with pytest.raises(DeadlineExceeded, match="nothing has moved") as caught:
                await desk.inbox.answer(Deadline.after(5), silence_s=0.05)
            assert caught.value.stage == blamed, last_word

    run(story)


def test_a_budget_that_ends_in_a_silence_is_not_told_to_grow():
    async def story(desk):
        for silence_s, hint, blamed in ((0.2, "may be frozen", 0), (60.0, "larger --budget", None)):
            desk.inbox.expect(1)
            desk.status(0, "token", done=1, total=9)
            desk.status(1, "token", done=1, total=9, token_id=5)
            with pytest.raises(DeadlineExceeded, match="spent") as caught:
                await desk.inbox.answer(Deadline.after(0.08), silence_s=silence_s)
            assert hint in caught.value.hint and caught.value.stage == blamed

    run(story)


def test_the_time_in_which_we_ourselves_were_stopped_is_nobodys_silence(monkeypatch):
    async def story(desk):
        desk.inbox.expect(1)
        late = asyncio.ensure_future(desk.inbox.answer(Deadline.after(60), silence_s=0.2))
        await asyncio.sleep(0)
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + 40)  # the process was stopped for 40 s
        await asyncio.sleep(0.05)
        assert not late.done()
        desk.deliver(ANSWER)
        assert (await late).text == "Hi"

    run(story)


def test_a_stage_speaks_for_itself_alone_and_only_the_last_one_answers():
    async def story(desk):
        desk.inbox.expect(1)
        failed = StageFailed(request_id=0, stage=1, phase="load", cause="a lie")
        told = StageStatus(stage=1, state="ready", done=0, total=0, token_id=-1, detail_json=ready("aa"))
        for lie, liar in ((failed, 0), (told, 0), (ANSWER, 0), (StageStatus(**{**vars(told), "stage": 7}), 1)):
            desk.deliver(lie, role=f"stage-{liar}-of-2")
        desk.deliver(told, role="orchestrator")
        desk.deliver(ANSWER)  # by whom it should be
        assert (await desk.inbox.answer(Deadline.after(5), silence_s=5)).text == "Hi"
        assert desk.inbox.refused == 5 and not desk.record.stage_info
        assert not desk.inbox._failure.done()
        desk.deliver(told)
        await desk.inbox._until(lambda: 1 in desk.record.stage_info, Deadline.after(5), 5, "the true word")

    said = run(story).stream.getvalue()
    assert "ignored StageFailed of stage 1 from stage-0-of-2, which is another's to say" in said


@pytest.mark.parametrize(
    "tale",
    [
        "[" * 100_000,
        f'{{"x": "{"x" * MAX_TOLD}"}}',
        "[]",
        "NaN",
        '{"prefill_us": 100, "token_us": [100, 20]}',
        '{"prefill_us": 100, "token_us": [100, 20], "stage_us": [[]]}',
        json.dumps({"blocks": 5, "weight_bytes": "many", "load_s": [], "fingerprint": ["a"], "model": 3}),
        json.dumps({"blocks": [], "weight_bytes": 10**400, "load_s": float("nan"), "device": {}}),
    ],
    ids=range(8),
)
def test_whatever_a_stage_tells_of_itself_the_reading_goes_on(tale):
    async def story(desk):
        desk.status(0, "ready", detail_json=tale)
        desk.status(1, "linked", detail_json=tale)
        desk.status(1, "ready", detail_json=ready("aa"))
        await desk.inbox._until(lambda: 1 in desk.record.stage_info, Deadline.after(5), 5, "the honest stage")
        desk.inbox.expect(1)
        desk.deliver(InferenceResponse(**{**vars(ANSWER), "timings_json": tale}))
        desk.record.take_answer(await desk.inbox.answer(Deadline.after(5), silence_s=5))

    record = run(story).record
    assert json.loads(json.dumps(record.to_json(), allow_nan=False))["text"] == "Hi"
    assert record.lines()
