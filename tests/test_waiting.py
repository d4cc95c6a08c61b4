"""Deadlines with names, clean-ups that nothing interrupts, tasks that end with their block."""

import asyncio

import pytest

from ppsmoke.errors import DeadlineExceeded, StageError
from ppsmoke.waiting import Deadline, cancel_and_reap, running, to_the_end


def run(coroutine):
    return asyncio.run(coroutine)


def test_a_spent_deadline_says_what_was_awaited_in_which_phase_and_how_long():
    async def story():
        with pytest.raises(DeadlineExceeded) as caught:
            await Deadline.after(0.01, phase="gather").wait(asyncio.Event().wait(), doing="waiting for stage 1")
        return caught.value

    error = run(story())
    assert str(error) == "gather: waiting for stage 1: 0.01 s spent"
    assert error.hint


def test_what_is_awaited_is_cancelled_and_reaped_before_the_error_is_raised():
    ended = []

    async def slow():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def story():
        with pytest.raises(DeadlineExceeded):
            await Deadline.after(0.01).wait(slow(), doing="waiting")
        return list(ended)

    assert run(story()) == [True]


def test_a_cancellation_that_arrives_with_the_result_is_not_lost():
    async def story():
        ready = asyncio.get_running_loop().create_future()
        waiter = asyncio.ensure_future(Deadline.after(5).wait(ready, doing="waiting"))
        await asyncio.sleep(0)
        ready.set_result("here")
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    run(story())


def test_the_tighter_of_two_deadlines_is_the_one_that_is_named():
    run_budget = Deadline.after(1000.0)
    assert run_budget.capped(10.0, phase="resolve").budget_s == 10.0
    assert Deadline.after(1.0).capped(10.0, phase="resolve").budget_s == 1.0
    assert Deadline.after(1.0).capped(10.0, phase="resolve").phase == "resolve"


def test_a_clean_up_runs_to_its_end_under_any_number_of_cancellations_and_then_passes_one_on():
    steps = []

    async def clean_up(go: asyncio.Event):
        await go.wait()
        steps.append("cleaned")

    async def story():
        go = asyncio.Event()
        task = asyncio.ensure_future(to_the_end(clean_up(go), doing="cleaning", within_s=5))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(story())
    assert steps == ["cleaned"]


def test_what_a_clean_up_raises_outranks_the_cancellation_that_came_meanwhile():
    async def fails(go):
        await go.wait()
        raise StageError("left over")

    async def story():
        go = asyncio.Event()
        task = asyncio.ensure_future(to_the_end(fails(go), doing="cleaning", within_s=5))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(StageError, match="left over"):
            await task

    run(story())


def test_a_clean_up_that_hangs_is_given_up_by_name():
    async def story():
        with pytest.raises(DeadlineExceeded, match="cleaning: 0.02 s spent"):
            await to_the_end(asyncio.Event().wait(), doing="cleaning", within_s=0.02)

    run(story())


def test_a_background_task_that_fails_ends_its_block_with_its_own_error():
    async def fails():
        raise StageError("worker died", stage=1)

    async def story():
        with pytest.raises(StageError, match="worker died"):
            async with running(fails(), name="watch"):
                await asyncio.Event().wait()
        # The cancellation that ended the block is spent: this task can wait again.
        await asyncio.sleep(0)

    run(story())


def test_the_outer_of_two_background_tasks_is_heard_through_the_inner_one():
    async def fails():
        raise StageError("outer")

    async def story():
        with pytest.raises(StageError, match="outer"):
            async with running(fails(), name="outer"), running(asyncio.Event().wait(), name="inner"):
                await asyncio.Event().wait()

    run(story())


def test_a_background_task_ends_with_its_block_and_the_blocks_own_error_passes():
    async def story():
        with pytest.raises(ValueError, match="body"):
            async with running(asyncio.Event().wait(), name="watch") as task:
                raise ValueError("body")
        assert task.cancelled()

    run(story())


def test_reaping_marks_errors_as_seen_and_never_raises():
    async def fails():
        raise ValueError("dropped")

    async def story():
        task = asyncio.ensure_future(fails())
        await asyncio.sleep(0)
        await cancel_and_reap(task)

    run(story())
