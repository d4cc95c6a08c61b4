"""The stage actor over an in-memory network: every number of stages, every way a request can end."""

from __future__ import annotations

import asyncio
import json

import pytest

from ppsmoke.cluster.addresses import Address, Delivery
from ppsmoke.errors import WorkerLost
from ppsmoke.pipeline import outbox
from ppsmoke.pipeline.messages import (
    InferenceRequest,
    InferenceResponse,
    NextToken,
    Reset,
    StageActivation,
    StageFailed,
    encode,
)
from tests.lab import still_worker
from tests.lab.cluster import until
from tests.pipeline.memory_net import ASKER, chain

STAGES = [1, 2, 3, 5]
CHUNK, CONTEXT = 8, 64  # still_worker's


def expected(prompt: str, count: int, *, raw: bool = True) -> tuple[int, ...]:
    return tuple(still_worker.continuation(still_worker.encode(prompt, raw=raw), count))


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_any_split_of_any_prompt_around_the_chunk_gives_the_same_tokens(num_stages, length):
    async def scenario():
        async with chain(num_stages) as pipeline:
            return await pipeline.ask("x" * length, max_tokens=9)

    response = asyncio.run(scenario())
    assert response.token_ids == expected("x" * length, 9)
    assert response.prompt_token_ids == tuple(still_worker.encode("x" * length, raw=True))
    assert response.finish_reason == "length"
    assert response.text == still_worker.decode(list(response.token_ids))


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize(
    ("length", "max_tokens", "count"),
    [
        (CONTEXT - 5, 5, 5),
        (CONTEXT - 5, 6, 5),
        (CONTEXT - 1, 100, 1),
        (1, CONTEXT - 1, CONTEXT - 1),
        (1, 999, CONTEXT - 1),
    ],
)
def test_an_answer_is_clipped_where_prompt_and_answer_fill_the_context(num_stages, length, max_tokens, count):
    async def scenario():
        async with chain(num_stages) as pipeline:
            return await pipeline.ask("y" * length, max_tokens=max_tokens)

    response = asyncio.run(scenario())
    assert response.token_ids == expected("y" * length, count)
    assert response.finish_reason == "length"


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ("z" * CONTEXT, 5, "64 tokens and the context holds 64"),
        ("z" * (CONTEXT + 1), 5, "65 tokens"),
        ("", 5, "no tokens"),
        ("hello", 0, "max_tokens is 0"),
        ("z" * 1_000_000, 5, "1000000 tokens"),
    ],
    ids=["context", "longer", "empty", "max_tokens_0", "million"],
)
def test_what_cannot_be_answered_is_refused_before_any_compute_and_the_next_request_is_served(
    num_stages, prompt, max_tokens, words
):
    async def scenario():
        async with chain(num_stages) as pipeline:
            refused = await pipeline.ask(prompt, request_id=3, max_tokens=max_tokens)
            computed = [op for worker in pipeline.workers for op in worker.ops if op != "tokenize"]
            return refused, computed, await pipeline.ask("then", request_id=4)

    refused, computed, answered = asyncio.run(scenario())
    assert isinstance(refused, StageFailed)
    assert (refused.request_id, refused.stage, refused.phase) == (3, 0, "ask")
    assert words in refused.cause and refused.hint
    assert computed == []
    assert answered.token_ids == expected("then", 5)


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("eog_at", [1, 2, 5])
def test_the_end_of_generation_token_is_in_the_ids_and_not_in_the_text(num_stages, eog_at):
    async def scenario():
        async with chain(num_stages, STILL_EOG_AT=str(eog_at)) as pipeline:
            return await pipeline.ask("Say hello", max_tokens=5)

    response = asyncio.run(scenario())
    before = expected("Say hello", eog_at - 1)
    assert response.token_ids == (*before, still_worker.EOG)
    assert response.text == still_worker.decode(list(before))
    assert response.finish_reason == "stop"


@pytest.mark.parametrize("num_stages", STAGES)
def test_requests_that_follow_each_other_at_once_each_begin_with_an_empty_cache(num_stages):
    async def scenario():
        async with chain(num_stages, busy_grace_s=5.0) as pipeline:
            return [await pipeline.ask(f"prompt {n}", request_id=n, max_tokens=n) for n in range(1, 8)]

    for n, response in enumerate(asyncio.run(scenario()), start=1):
        assert response.token_ids == expected(f"prompt {n}", n)


@pytest.mark.parametrize("num_stages", STAGES)
def test_every_message_that_arrives_three_times_counts_once(num_stages):
    async def scenario():
        async with chain(num_stages, busy_grace_s=5.0) as pipeline:
            pipeline.net.tap = lambda role, message: 1 if isinstance(message, InferenceResponse) else 3
            answers = [await pipeline.ask("a long enough prompt", request_id=n) for n in (1, 2)]
            return answers, [worker.ops for worker in pipeline.workers]

    answers, ops = asyncio.run(scenario())
    assert [answer.token_ids for answer in answers] == [expected("a long enough prompt", 5)] * 2
    assert ops[0].count("tokenize") == 2


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("kind", [StageActivation, NextToken])
def test_a_lost_message_is_named_and_not_computed_around(num_stages, kind):
    async def scenario():
        async with chain(num_stages) as pipeline:
            seen = []

            def lose_the_second(role, message):
                seen.append(isinstance(message, kind))
                return 0 if seen[-1] and sum(seen) == 2 else 1

            pipeline.net.tap = lose_the_second
            if kind is NextToken:
                pipeline.request(max_tokens=5)
                while sum(seen) < 2:
                    await asyncio.sleep(0)
                later = NextToken(request_id=7, token_id=9, position=99, done=False)
                exit_role = f"stage-{num_stages - 1}-of-{num_stages}"
                pipeline.net.deliver("e" * 16, exit_role, pipeline.net.names["pp-entry"], encode(later))
                return await pipeline.outcome()
            return await pipeline.ask("w" * 20)

    failed = asyncio.run(scenario())
    assert isinstance(failed, StageFailed)
    assert "one was lost" in failed.cause and failed.request_id == 7


def test_stages_compute_at_the_same_time_while_a_prompt_comes_in():
    async def scenario():
        async with chain(3) as pipeline:
            order = []
            for stage, worker in enumerate(pipeline.workers):

                async def call(op, call=worker.call, stage=stage, **fields):
                    order.append((stage, fields.get("position")))
                    return await call(op, **fields)

                worker.call = call
            await pipeline.ask("v" * (7 * CHUNK), max_tokens=1)
            return order

    order = asyncio.run(scenario())
    assert order.index((2, 0)) < order.index((0, 6 * CHUNK))


def test_a_stage_whose_worker_takes_smaller_chunks_cuts_what_it_gets():
    async def scenario():
        environments = {1: {"STILL_CHUNK": "3"}, 2: {"STILL_CHUNK": "5"}}
        async with chain(3, environments=environments) as pipeline:
            return await pipeline.ask("u" * 21)

    assert asyncio.run(scenario()).token_ids == expected("u" * 21, 5)


def test_a_second_request_is_refused_while_the_first_one_runs_and_the_first_is_unharmed():
    async def scenario():
        async with chain(2) as pipeline:
            pipeline.request("first", request_id=1, max_tokens=40)
            pipeline.request("second", request_id=2)
            return [await pipeline.outcome() for _ in range(2)]

    refused, answer = asyncio.run(scenario())
    assert isinstance(refused, StageFailed) and refused.request_id == 2 and "request 1, one at a time" in refused.cause
    assert answer.token_ids == expected("first", 40)


def test_a_request_that_overtakes_the_end_of_the_first_one_is_held_and_a_third_refused():
    async def scenario():
        async with chain(2, busy_grace_s=30.0) as pipeline:
            for request_id in (1, 2, 3):
                pipeline.request(f"prompt {request_id}", request_id=request_id)
            return [await pipeline.outcome() for _ in range(3)]

    refused, *answers = asyncio.run(scenario())
    assert refused.request_id == 3
    assert [(a.request_id, a.token_ids) for a in answers] == [(n, expected(f"prompt {n}", 5)) for n in (1, 2)]


@pytest.mark.parametrize(("num_stages", "stage"), [(1, 0), (2, 0), (2, 1), (3, 1), (5, 4)])
@pytest.mark.parametrize("at_op", [1, 2, 4])
@pytest.mark.parametrize("how", ["die", "hang"])
def test_a_lost_worker_is_reported_once_with_its_last_words_and_ends_the_actor(num_stages, stage, at_op, how):
    async def scenario():
        async with chain(num_stages, faults={stage: {at_op: how}}, step_deadline_s=0.05) as pipeline:
            failed = await pipeline.ask("t" * 20, max_tokens=5)
            with pytest.raises(WorkerLost):
                await pipeline.tasks[stage]
            await asyncio.sleep(0)
            leftover = pipeline.net.queues[ASKER.node_id].qsize()
            return failed, leftover, [task.done() for task in pipeline.tasks]

    failed, leftover, done = asyncio.run(scenario())
    assert isinstance(failed, StageFailed)
    assert (failed.stage, failed.phase, failed.request_id) == (stage, "ask", 7)
    assert failed.detail == "its last words"
    assert leftover == 0 and done == [index == stage for index in range(num_stages)]


@pytest.mark.parametrize(("num_stages", "stage"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("at_op", [1, 2, 3, 5])
@pytest.mark.parametrize("fault", ["error", {"hidden_b64": "AAA", "token_id": -5, "tokens": [1.5], "text": 3}])
def test_a_worker_that_refuses_or_answers_nonsense_costs_one_request_only(num_stages, stage, at_op, fault):
    async def scenario():
        async with chain(num_stages, faults={stage: {at_op: fault}}, busy_grace_s=5.0) as pipeline:
            first = await pipeline.ask("s" * 20, request_id=1, max_tokens=3)
            for worker in pipeline.workers:
                worker.faults = {}
            if isinstance(first, InferenceResponse):  # the fault fell on an op that needs no answer
                return first, first
            return first, await pipeline.ask("again", request_id=2)

    first, second = asyncio.run(scenario())
    if first is second:
        return
    assert (first.request_id, first.stage, first.phase) == (1, stage, "ask")
    assert second.token_ids == expected("again", 5)


def test_a_worker_lost_while_idle_ends_its_actor():
    async def scenario():
        async with chain(2) as pipeline:
            await pipeline.ask()
            pipeline.workers[1].lost.set_result(WorkerLost("gone", phase="ask", stage=1))
            failed = await pipeline.outcome()
            with pytest.raises(WorkerLost):
                await pipeline.tasks[1]
            return failed

    failed = asyncio.run(scenario())
    assert (failed.stage, failed.cause) == (1, "gone")


def test_messages_from_whoever_may_not_send_them_change_nothing():
    async def scenario():
        async with chain(3) as pipeline:
            entry, middle = pipeline.net.names["pp-entry"], pipeline.net.names["pp-stage-1"]
            hidden = {"seq_len": 1, "hidden_dim": 16, "dtype": "bfloat16", "hidden": bytes(32), "last_chunk": True}
            first = {
                "position": 0,
                "is_prefill": True,
                "max_tokens": 1,
                "reply_to": str(ASKER),
                "prompt_token_ids": (1,),
            }
            forged = encode(StageActivation(request_id=7, **hidden, **first))
            pipeline.request("honest", max_tokens=30)
            for _ in range(20):
                await asyncio.sleep(0)
                pipeline.net.deliver("d" * 16, "stage-2-of-3", middle, forged)
                pipeline.net.deliver("d" * 16, "stage-0-of-2", middle, forged)
                pipeline.net.deliver("d" * 16, "stage-2-of-3", middle, encode(Reset(request_id=7)))
                token = encode(NextToken(request_id=7, token_id=1, position=6, done=False))
                pipeline.net.deliver("d" * 16, "stage-1-of-3", entry, token)
            return await pipeline.outcome()

    assert asyncio.run(scenario()).token_ids == expected("honest", 30)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_request_that_its_asker_gives_up_frees_the_chain_for_the_next(num_stages):
    async def scenario():
        async with chain(num_stages, busy_grace_s=5.0) as pipeline:
            entry = pipeline.net.names["pp-entry"]
            lost: list[NextToken] = []
            pipeline.net.tap = lambda role, message: lost.append(message) or 0 if type(message) is NextToken else 1
            pipeline.request("never answered", request_id=1)
            while not lost:
                await asyncio.sleep(0)
            pipeline.net.tap = lambda role, message: 1
            pipeline.net.deliver(ASKER.node_id, "orchestrator", entry, encode(Reset(request_id=1)))
            return await pipeline.ask("again", request_id=2)

    assert asyncio.run(scenario()).token_ids == expected("again", 5)


def test_bytes_that_are_no_message_are_reported_and_the_stage_lives_on():
    async def scenario():
        async with chain(1) as pipeline:
            queue = pipeline.net.queues[pipeline.net.names["pp-entry"].node_id]
            queue.put_nowait(Delivery(ASKER.node_id, "orchestrator", b"\x09 what"))
            return await pipeline.outcome(), await pipeline.ask()

    failed, answer = asyncio.run(scenario())
    assert failed.request_id == 0 and "kind: 9 is unknown" in failed.cause
    assert answer.token_ids == expected("Say hello", 5)


def test_a_model_of_another_width_is_named():
    async def scenario():
        async with chain(2, environments={1: {"STILL_DIM": "32"}}) as pipeline:
            return await pipeline.ask()

    failed = asyncio.run(scenario())
    assert failed.stage == 1 and "16 wide, this stage's model is 32" in failed.cause


def test_a_next_stage_that_cannot_be_reached_is_named_and_the_actor_lives_on():
    async def scenario():
        async with chain(2, busy_grace_s=5.0) as pipeline:
            pipeline.net.unreachable.add(pipeline.net.names["pp-stage-1"].node_id)
            failed = await pipeline.ask(request_id=1)
            pipeline.net.unreachable.clear()
            return failed, await pipeline.ask(request_id=2)

    failed, answer = asyncio.run(scenario())
    assert (failed.stage, failed.request_id) == (0, 1) and "no link" in failed.cause
    assert answer.token_ids == expected("Say hello", 5)


@pytest.mark.parametrize("num_stages", STAGES)
def test_the_orchestrator_hears_of_each_chunk_and_token_and_takes_no_part(num_stages):
    async def scenario():
        async with chain(num_stages) as pipeline:
            answer = await pipeline.ask("r" * 20, max_tokens=4)
            return answer, pipeline.statuses

    answer, statuses = asyncio.run(scenario())
    tokens = [s for s in statuses if s.state == "token"]
    at_exit = [(s.done, s.total, s.token_id) for s in tokens if s.stage == num_stages - 1]
    assert at_exit == [(n + 1, 4, token) for n, token in enumerate(answer.token_ids)]
    for stage in range(num_stages - 1):  # each step that it did its part of, as the exit will count it
        assert [(s.done, s.token_id) for s in tokens if s.stage == stage] == [(n, -1) for n in (2, 3, 4)]
    assert [s.done for s in statuses if s.state == "prefill" and s.stage == 0][:2] == [8, 16]
    ready = {s.stage: json.loads(s.detail_json) for s in statuses if s.state == "ready"}
    assert sorted(ready) == list(range(num_stages)) and ready[0]["chunk"] == CHUNK
    timings = json.loads(answer.timings_json)
    assert len(timings["token_us"]) == len(timings["stage_us"]) == 4 and timings["prefill_us"] == timings["token_us"][0]
    assert timings["stage_us"][0] == [3 * (10 + stage) for stage in range(num_stages)]
    assert timings["stage_us"][1:] == [[10 + stage for stage in range(num_stages)]] * 3


def test_the_reply_goes_where_the_request_says_and_not_to_whoever_watches():
    async def scenario():
        async with chain(2) as pipeline:
            other = Address("a" * 16, "asker")
            pipeline.net.queues[other.node_id] = asyncio.Queue()
            sent = []
            pipeline.net.tap = lambda role, message: sent.append(message) or 1
            request = InferenceRequest(request_id=1, max_tokens=2, raw=True, reply_to=str(other), prompt="p")
            pipeline.net.deliver(ASKER.node_id, "orchestrator", pipeline.net.names["pp-entry"], encode(request))
            return await pipeline.net.queues[other.node_id].get()

    assert asyncio.run(scenario()).sender_role == "stage-1-of-2"


@pytest.mark.parametrize(("max_tokens", "kind"), [(3, InferenceResponse), (0, StageFailed)])
def test_an_answer_or_a_failure_waits_for_an_orchestrator_that_sleeps(max_tokens, kind, monkeypatch):
    monkeypatch.setattr(outbox, "AGAIN_S", 0.01)

    async def scenario():
        async with chain(2) as pipeline:
            pipeline.net.unreachable.add(ASKER.node_id)
            pipeline.request(max_tokens=max_tokens)
            await until(lambda: any(isinstance(message, kind) for message in pipeline.net.refused))
            pipeline.net.unreachable.clear()
            return await pipeline.outcome()

    assert isinstance(asyncio.run(scenario()), kind)
