"""AsyncLLM: an iterator per request over an engine in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedkv import AsyncLLM, SamplingParams
from pagedkv.engine.outputs import RequestOutput
from pagedkv.errors import EngineDead, InvalidRequest, QueueFull, RequestFailed

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def llm(tiny_model: Callable[..., Path]) -> Iterator[AsyncLLM]:
    others = set(threading.enumerate())  # engines of other tests, whose fixtures live longer
    made = AsyncLLM(
        str(tiny_model()), num_gpu_blocks_override=256, max_model_len=512, max_num_seqs=4, max_num_queued_reqs=8
    )
    yield made
    made.shutdown()
    left = set(threading.enumerate()) - others
    assert not any(thread.name == "pagedkv-engine" and thread.is_alive() for thread in left)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=60))


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


async def until_idle(llm: AsyncLLM) -> None:
    while llm.stats().num_running or llm.stats().num_waiting:
        await asyncio.sleep(0.005)


def test_outputs_are_cumulative_and_the_last_is_finished(llm: AsyncLLM) -> None:
    async def work() -> None:
        text, ids = "", []
        async for output in llm.generate("the cache", GREEDY):
            sample = output.outputs[0]
            assert sample.text.startswith(text)
            assert list(sample.token_ids)[: len(ids)] == ids
            text, ids = sample.text, list(sample.token_ids)
        assert output.finished
        assert len(ids) == 12
        assert output.metrics.time_to_first_token is not None
        assert output.metrics.queue_time is not None

    run(work())


def test_many_at_once_with_one_name_each_get_their_own(llm: AsyncLLM) -> None:
    async def work() -> None:
        alone = [await last(llm.generate([10 + i, 20, 30], GREEDY)) for i in range(4)]
        together = await asyncio.gather(*(last(llm.generate([10 + i, 20, 30], GREEDY, "same")) for i in range(4)))
        for one, other in zip(alone, together, strict=True):
            assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids)

    run(work())


@pytest.mark.parametrize("how", ["break", "cancel", "close"])
def test_b66_a_consumer_that_goes_away_ends_its_request(llm: AsyncLLM, how: str) -> None:
    async def work() -> None:
        outputs = llm.generate("the cache", LONG)
        if how == "cancel":
            task = asyncio.create_task(last(outputs))
            while not llm.stats().num_running:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await outputs.__anext__()
            await outputs.aclose()  # type: ignore[attr-defined]
        await until_idle(llm)
        stats = llm.stats()
        assert stats.finished["abort"] == 1
        assert stats.blocks_in_use == 0
        assert stats.generated_tokens < 400

    run(work())


def test_b66_one_that_is_cancelled_while_it_waits_never_runs(llm: AsyncLLM) -> None:
    async def work() -> None:
        running = [asyncio.create_task(last(llm.generate([50 + i], LONG))) for i in range(4)]
        while llm.stats().num_running < 4:
            await asyncio.sleep(0.005)
        queued = asyncio.create_task(last(llm.generate([3, 4, 5], GREEDY, "queued")))
        while not llm.stats().num_waiting:
            await asyncio.sleep(0.005)
        queued.cancel()
        while llm.stats().num_waiting:
            await asyncio.sleep(0.005)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, queued, return_exceptions=True)
        await until_idle(llm)
        assert llm.stats().finished["abort"] == 5

    run(work())


def test_a_full_queue_is_an_error_at_once_and_the_others_are_answered(llm: AsyncLLM) -> None:
    async def work() -> None:
        tasks = [asyncio.create_task(last(llm.generate([60 + i], LONG))) for i in range(4)]
        while llm.stats().num_running < 4:
            await asyncio.sleep(0.005)
        tasks += [asyncio.create_task(last(llm.generate([70 + i], GREEDY))) for i in range(8)]
        while llm.stats().num_waiting < 8:
            await asyncio.sleep(0.005)
        with pytest.raises(QueueFull) as caught:
            await last(llm.generate([80], GREEDY))
        assert caught.value.limit == 8
        outputs = await asyncio.gather(*tasks)
        assert all(output.finished for output in outputs)

    run(work())


def test_abort_by_name_ends_the_iterator_with_abort(llm: AsyncLLM) -> None:
    async def work() -> None:
        task = asyncio.create_task(last(llm.generate("the cache", LONG, "mine")))
        while not llm.stats().num_running:
            await asyncio.sleep(0.005)
        llm.abort("somebody else's")
        llm.abort("mine")
        output = await task
        assert output.outputs[0].finish_reason == "abort"
        assert output.request_id == "mine"

    run(work())


@pytest.mark.parametrize(
    ("prompt", "field"), [("", "prompt"), ([], "prompt"), ([10**6], "prompt"), (None, "prompt"), ([3] * 600, "prompt")]
)
def test_a_bad_request_is_refused_and_the_engine_lives(llm: AsyncLLM, prompt: object, field: str) -> None:
    async def work() -> None:
        with pytest.raises(InvalidRequest) as caught:
            await last(llm.generate(prompt, GREEDY))  # type: ignore[arg-type]
        assert caught.value.field == field
        with pytest.raises(InvalidRequest, match="cache_salt"):
            await last(llm.generate("x", GREEDY, cache_salt=""))
        assert llm.is_alive
        assert (await last(llm.generate("the cache", GREEDY))).finished

    run(work())


def test_tenants_never_share_and_a_salt_cannot_name_a_tenant(llm: AsyncLLM) -> None:
    async def work() -> None:
        prompt = list(range(10, 60))
        cached = []
        for tenant, salt in (("A", None), ("B", None), (None, None), (None, "1:A:"), ("A", "x"), ("A", None)):
            output = await last(llm.generate(prompt, GREEDY, tenant=tenant, cache_salt=salt))
            cached.append(output.num_cached_tokens)
        assert cached == [0, 0, 0, 0, 0, 48]

    run(work())


def test_a_failure_of_one_request_is_raised_to_it_alone(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = llm._built.engine.sampling._sampler
    honest = sampler.sample

    def sample(logits: Any, rows: Any) -> Any:
        if any(row.params.seed == 13 for row in rows):
            raise ZeroDivisionError("thirteen")
        return honest(logits, rows)

    monkeypatch.setattr(sampler, "sample", sample)

    async def work() -> None:
        good = asyncio.create_task(last(llm.generate("the cache", GREEDY)))
        with pytest.raises(RequestFailed, match="thirteen"):
            await last(llm.generate("the cache", SamplingParams(seed=13)))
        assert (await good).finished
        assert llm.is_alive

    run(work())


def test_when_the_engine_dies_everyone_hears_of_it(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        tasks = [asyncio.create_task(last(llm.generate([90 + i], LONG))) for i in range(6)]
        while llm.stats().num_running < 4:
            await asyncio.sleep(0.005)

        def fail(*_: Any) -> Any:
            raise MemoryError("no memory for this step")

        monkeypatch.setattr(llm._built.engine.runner, "run", fail)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDead) for result in results)
        assert "no memory for this step" in str(results[0])
        assert not llm.is_alive
        with pytest.raises(EngineDead):
            await last(llm.generate("the cache", GREEDY))
        with pytest.raises(EngineDead):
            await llm.reset_prefix_cache()

    run(work())


def test_shutdown_ends_the_thread_and_what_runs_and_may_be_called_twice(llm: AsyncLLM) -> None:
    async def work() -> None:
        task = asyncio.create_task(last(llm.generate("the cache", LONG)))
        while not llm.stats().num_running:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDead, match="shut down"):
            await task
        llm.shutdown()
        assert not llm.is_alive

    run(work())


def test_reset_and_chat(llm: AsyncLLM) -> None:
    async def work() -> None:
        message = {"role": "user", "content": "What is a block of the cache, and who shares it?"}
        await last(llm.chat([message], GREEDY))
        again = await last(llm.chat([message], GREEDY))
        assert again.num_cached_tokens > 16
        assert await llm.reset_prefix_cache() == (True, 0)
        assert (await last(llm.chat([message], GREEDY))).num_cached_tokens == 0

    run(work())


def test_two_event_loops_one_after_the_other(llm: AsyncLLM) -> None:
    first = run(last(llm.generate("the cache", GREEDY)))
    second = run(last(llm.generate("the cache", GREEDY)))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
