"""A state machine over the whole engine with a fake model: requests come, run, are aborted and starved.

After every step the books are checked (I1-I7, and I4 inside the model); at the end everything ends, the ledger is
balanced, and every answer equals that of a lone run in an engine with all the room there is (I9).
"""

from __future__ import annotations

from functools import lru_cache

from fake_engine import FakeEngine, lone, make_engine, tokens_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.params import BeamSearchParams, SamplingParams

EOS = 5
PREFIXES = ([1] * 9, [1] * 6 + [2, 3], list(range(10, 26)))
HOG = "a sequence that is not the engine's"


@lru_cache(maxsize=4096)
def lone_tokens(prompt: tuple[int, ...], params: SamplingParams | BeamSearchParams) -> list[list[int]]:
    return tokens_of(lone(list(prompt), params, eos_ids=(EOS,)))


class EngineMachine(RuleBasedStateMachine):
    """The system under test is the engine; the model of it is the lone run of each request."""

    @initialize(
        policy=st.sampled_from(["lpm", "fcfs", "priority"]),
        num_blocks=st.integers(13, 32),
        budget=st.integers(4, 40),
        prefix=st.booleans(),
        overtakes=st.sampled_from([0, 2, 64]),
    )
    def start(self, policy: str, num_blocks: int, budget: int, prefix: bool, overtakes: int) -> None:
        self.engine: FakeEngine = make_engine(
            num_blocks,
            prefix=prefix,
            eos_ids=(EOS,),
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            scheduling_policy=policy,
            max_overtakes=overtakes,
        )
        self.asked: dict[str, tuple[tuple[int, ...], SamplingParams | BeamSearchParams]] = {}
        self.done: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()
        self.was_starved = False

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(0, 30), min_size=1, max_size=14),
        max_tokens=st.integers(1, 14),
        kind=st.sampled_from(["greedy", "greedy", "samples", "beams", "scored"]),
        salt=st.sampled_from([None, None, "a"]),
        priority=st.integers(-1, 1),
    )
    def add(
        self, prefix: list[int], tail: list[int], max_tokens: int, kind: str, salt: str | None, priority: int
    ) -> None:
        prompt = [*prefix, *tail]
        params: SamplingParams | BeamSearchParams
        if kind == "beams":
            params = BeamSearchParams(3, max_tokens)
        elif kind == "samples":
            params = SamplingParams(n=3, temperature=1.0, seed=len(prompt), max_tokens=max_tokens)
        else:
            scored = 0 if kind == "scored" else None
            params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=scored)
        name = f"request {len(self.asked)}"
        self.engine.add_request(name, prompt, params, cache_salt=salt, priority=priority)
        self.asked[name] = (tuple(prompt), params)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.checked_step():
                self.see(output)

    @precondition(lambda self: len(self.asked) > len(self.done) + len(self.aborted))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        open_ones = sorted(set(self.asked) - set(self.done) - self.aborted)
        name = data.draw(st.sampled_from(open_ones))
        for output in self.engine.abort(name):
            assert output.finished
            assert {sample.finish_reason for sample in output.outputs} <= {"abort", "stop", "length"}
        self.aborted.add(name)
        assert self.engine.abort(name) == []

    @precondition(lambda self: HOG not in self.engine.scheduler.manager.tables)
    @rule(blocks=st.integers(1, 8))
    def starve(self, blocks: int) -> None:
        """Blocks are taken away by somebody the engine does not know."""
        manager, prefix = self.engine.scheduler.manager, self.engine.scheduler.prefix
        blocks = min(blocks, manager.num_available, manager.allocator.num_blocks - 12)
        if blocks > 0:
            if prefix is not None:
                prefix.evict(blocks)
            manager.create(HOG)
            manager.reserve(HOG, blocks * manager.block_size)
            self.was_starved = True

    @precondition(lambda self: HOG in self.engine.scheduler.manager.tables)
    @rule()
    def feed(self) -> None:
        self.engine.scheduler.manager.free(HOG)

    @precondition(lambda self: self.engine.scheduler.prefix is not None)
    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    @rule()
    def drain(self) -> None:
        """Everything that is here ends, however it is starved."""
        if HOG in self.engine.scheduler.manager.tables:
            self.feed()
        for output in self.engine.run(limit=2_000).values():
            self.see(output)

    def see(self, output: RequestOutput) -> None:
        if output.finished and output.request_id not in self.aborted:
            assert output.error is None
            assert output.request_id not in self.done, "reported as finished twice"
            self.done[output.request_id] = output

    @invariant()
    def books(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.drain()
        self.engine.assert_balanced()
        assert set(self.done) | self.aborted == set(self.asked)
        for name, output in self.done.items():
            prompt, params = self.asked[name]
            expected, got = lone_tokens(prompt, params), tokens_of(output)
            if got != expected:
                assert self.was_starved or self.needs_too_much(prompt, params), (name, got, expected)
                if isinstance(params, SamplingParams):
                    for mine, alone in zip(got, expected, strict=True):
                        assert mine == alone[: len(mine)]

    def needs_too_much(self, prompt: tuple[int, ...], params: SamplingParams | BeamSearchParams) -> bool:
        """It may end early only where even alone its sequence does not fit in the pool."""
        manager = self.engine.scheduler.manager
        return manager.blocks_needed(len(prompt) + (params.max_tokens or 0)) > manager.allocator.num_blocks


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
