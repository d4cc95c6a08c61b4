"""For other people's test suites, unittest or pytest: a real pipeline of local stages as a context manager.

with ppsmoke.testing.loopback("smollm2:135m", 2) as pipeline:
    answer = pipeline.ask("Say hello", max_tokens=16)
    assert answer.text
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ppsmoke import smoke
from ppsmoke.errors import DeadlineExceeded, InputError, MessageError, StageError
from ppsmoke.rent.loopback import LoopbackFleet
from ppsmoke.report.progress import QUIET, Progress
from ppsmoke.report.summary import RunRecord
from ppsmoke.settings import LOOPBACK_MODEL, Settings
from ppsmoke.waiting import Deadline

ASK_BUDGET_S = 120.0
STAY_S = 86_400.0  # how long stages may stay up that nobody ends


@dataclass(frozen=True)
class Answer:
    """What came back: the text, the ids it was made of, those of the prompt, and why it ended ("stop", "length")."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class _Question:
    prompt: str
    raw: bool
    max_tokens: int
    within_s: float
    answer: Future[Answer]


class LoopbackPipeline:
    """Loaded stages, in a thread of their own."""

    def __init__(self) -> None:
        self._up: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._questions: asyncio.Queue[_Question | None] | None = None
        self._ended: BaseException | None = None
        self._thread: threading.Thread | None = None

    def ask(self, prompt: str, *, max_tokens: int = 64, raw: bool = False, within_s: float = ASK_BUDGET_S) -> Answer:
        """The answer, its text never empty. Raises SmokeError; after one that a stage died of, every later ask does."""
        _check_question(prompt, max_tokens)
        if self._ended is not None:
            raise StageError(f"the pipeline has ended: {self._ended}", hint="open another one") from self._ended
        question = _Question(prompt, raw, max_tokens, within_s, Future())
        self._loop.call_soon_threadsafe(self._questions.put_nowait, question)
        return question.answer.result(within_s + LoopbackFleet.destroy_budget_s)

    def _start(self, settings: Settings) -> None:
        self._thread = threading.Thread(target=self._run, args=(settings,), name="ppsmoke loopback", daemon=True)
        self._thread.start()
        self._up.result()

    def _stop(self) -> None:
        if self._ended is None and self._loop is not None:
            self._ended = StageError("its block has ended")
            self._loop.call_soon_threadsafe(self._questions.put_nowait, None)
        self._thread.join(LoopbackFleet.destroy_budget_s)

    def _run(self, settings: Settings) -> None:
        try:
            asyncio.run(self._serve(settings))
        except BaseException as error:  # the thread's last act: whoever waits raises it
            self._ended = error
            if not self._up.done():
                self._up.set_exception(error)

    async def _serve(self, settings: Settings) -> None:
        self._loop, self._questions = asyncio.get_running_loop(), asyncio.Queue()
        record = RunRecord(run_id=settings.run_id, model_name=settings.model, num_stages=settings.num_stages)
        progress = Progress(record, verbosity=settings.verbosity)
        open_question: _Question | None = None
        try:
            async with smoke.stages_up(settings, progress, _open_fleet, Deadline.after(settings.budget_s)) as pipeline:
                self._up.set_result(None)
                while (open_question := await self._questions.get()) is not None:
                    await _answer(pipeline, open_question)
        except BaseException as error:
            self._ended = error
            waiting = [open_question] if open_question else []
            while not self._questions.empty():
                waiting += [question] if (question := self._questions.get_nowait()) else []
            for question in waiting:
                if not question.answer.done():
                    question.answer.set_exception(error)
            raise


def _check_question(prompt: str, max_tokens: int) -> None:
    """Raises InputError or UsageError for what no run would take: the pipeline lives on."""
    if not isinstance(prompt, str) or not isinstance(max_tokens, int):
        kinds = f"{type(prompt).__name__} and {type(max_tokens).__name__}"
        raise InputError(f"ask() takes a str and max_tokens as an int, not {kinds}", phase="ask")
    Settings(prompt=prompt, max_tokens=max_tokens)


async def _answer(pipeline: smoke.Pipeline, question: _Question) -> None:
    """Settle the question; a stage that refuses it, or time that runs out, fails this question alone."""
    deadline = Deadline.after(question.within_s, phase="ask")
    try:
        got = await pipeline.ask(question.prompt, raw=question.raw, max_tokens=question.max_tokens, deadline=deadline)
    except (StageError, DeadlineExceeded, MessageError) as error:
        question.answer.set_exception(error)
    else:
        question.answer.set_result(Answer(got.text, list(got.token_ids), list(got.prompt_token_ids), got.finish_reason))


def _open_fleet(progress: Progress) -> LoopbackFleet:
    return LoopbackFleet(on_line=progress.child_line)


@contextmanager
def loopback(
    model: str | os.PathLike[str] = LOOPBACK_MODEL, stages: int = 2, **options: Any
) -> Iterator[LoopbackPipeline]:
    """A pipeline of local stage processes for this block. model: as --model takes it.

    options: max_context (tokens), wire_dtype, device, budget_s (seconds to be up). Raises SmokeError where it does not
    come up. When the block ends, so has every process that it started.
    """
    pipeline = LoopbackPipeline()
    try:
        pipeline._start(
            Settings(model=os.fspath(model), num_stages=stages, verbosity=QUIET, lifetime_s=STAY_S, **options)
        )
        yield pipeline
    finally:
        if pipeline._thread is not None:
            pipeline._stop()
