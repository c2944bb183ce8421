"""I1-I8 held by a model: a plain list of slots says which prefix each slot must hold.

The machine drives allocator, manager and prefix cache; a slot of the model's memory holds the whole text up to and
including its token, under its salt. So a missing copy, a lost reference, a wrong hit or an early hand-out shows as a
slot with another text. The mutation tests at the end prove that it does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from python_loops import loops_in_python

from pagedkv.cache import index as index_module
from pagedkv.cache import keys as keys_module
from pagedkv.cache import prefix as prefix_module
from pagedkv.cache.index import BlockIndex
from pagedkv.cache.keys import KeyScope
from pagedkv.cache.manager import BlockCopy, KVCacheManager
from pagedkv.cache.native import IN_PYTHON, extension
from pagedkv.cache.prefix import PrefixCache
from pagedkv.cache.slots import physical_slot
from pagedkv.errors import BlockStateError, InvalidRequest, OutOfBlocks, SequenceExists, UnknownSequence

BLOCK = 3
NUM_BLOCKS = 11
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from(["", "tenant"])


def expected_key(salt: str, text: tuple[int, ...]) -> bytes:
    """The key of the last block of ``text``, written down a second time from its definition."""

    def part(tag: bytes, content: bytes) -> bytes:
        return tag + len(content).to_bytes(4, "little") + content

    names = ("model", "rope", "dtype", "kv_dtype", "adapter", "salt")
    values = dict.fromkeys(names, "") | {"salt": salt}
    root = b"pagedkv scope 1" + part(b"B", BLOCK.to_bytes(4, "little"))
    key = hashlib.sha256(
        root + b"".join(part(b"S", name.encode()) + part(b"V", values[name].encode()) for name in names)
    ).digest()
    for start in range(0, len(text), BLOCK):
        chunk = b"".join(token.to_bytes(4, "little") for token in text[start : start + BLOCK])
        key = hashlib.sha256(part(b"P", key) + part(b"T", chunk)).digest()
    return key


class CacheMachine(RuleBasedStateMachine):
    """Random calls against the accounts; every step is compared with the model."""

    manager_class: type[KVCacheManager] = KVCacheManager
    strong_hash = True

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.manager_class(NUM_BLOCKS, BLOCK)
        self.cache = PrefixCache(self.manager)
        self.memory: list[list[Any]] = [[None] * BLOCK for _ in range(NUM_BLOCKS)]
        self.texts: dict[int, list[int]] = {}  # tokens whose KV is written
        self.rest: dict[int, list[int]] = {}  # tokens of the prompt that are still to be computed
        self.salts: dict[int, str] = {}
        self.stale: set[int] = set()
        self.past: list[tuple[str, list[int]]] = [("", [0] * BLOCK)]  # texts that were published once
        self.next_seq = 0

    # what the model knows

    def slot(self, seq: int, position: int) -> tuple[str, tuple[int, ...]]:
        return self.salts[seq], tuple(self.texts[seq][: position + 1])

    def cached_texts(self) -> set[tuple[str, tuple[int, ...]]]:
        return {self.memory[block][-1] for block, flag in enumerate(self.manager.allocator.cached) if flag}

    def expected_hit(self, salt: str, prompt: list[int]) -> tuple[int, int]:
        """(tokens in full blocks, tokens with the best continuation) that a look-up must find."""
        cached, most = self.cached_texts(), len(prompt) - 1
        full = 0
        while full + BLOCK <= most and (salt, tuple(prompt[: full + BLOCK])) in cached:
            full += BLOCK
        best = 0
        for other_salt, text in cached:
            if other_salt == salt and len(text) == full + BLOCK and list(text[:full]) == prompt[:full]:
                common = next((i for i in range(BLOCK) if [*prompt, -1][full:][i] != text[full + i]), BLOCK)
                best = max(best, min(common, most - full))
        return full, full + best

    def snapshot(self) -> tuple[Any, ...]:
        manager, index = self.manager, self.cache.index
        allocator = manager.allocator
        return (
            {seq: table.copy() for seq, table in manager.tables.items()},
            manager.lengths.copy(),
            allocator.refs.copy(),
            bytes(allocator.cached),
            allocator.free_blocks(),
            self.cache.policy.idle_blocks(),
            index.blocks.copy(),
            self.cache.stats.__dict__.copy(),
        )

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.texts)), label="seq")

    def new_seq(self) -> int:
        self.next_seq += 1
        return self.next_seq

    # the calls

    @rule(data=st.data(), tail=st.lists(st.integers(0, 1), max_size=4), read=st.sampled_from([True, True, True, False]))
    def attach_again(self, data: st.DataObject, tail: list[int], read: bool) -> None:
        """A prompt that begins as an earlier text did, up to a position of any kind."""
        salt, text = data.draw(st.sampled_from(self.past), label="past")
        length = data.draw(st.integers(1, len(text)), label="length")
        self.attach([*text[:length], *tail], salt, read)

    @rule(prompt=TOKENS, salt=SALTS, read=st.just(True))
    def attach(self, prompt: list[int], salt: str, read: bool) -> None:
        before, scope = self.snapshot(), KeyScope(salt=salt)
        fits_cold = self.manager.num_available >= self.manager.blocks_needed(len(prompt))
        match = self.cache.match(prompt, scope=scope)
        assert self.snapshot() == before, "match changed something"
        full, best = self.expected_hit(salt, prompt)
        seq = self.new_seq()
        cached = self.cache.attach(seq, prompt, scope=scope, read=read)
        assert 0 <= cached <= len(prompt) - 1
        assert cached == (match.num_cached_tokens if read else 0)
        if read and self.strong_hash:
            assert cached == (full if match.given_up else best)
        if fits_cold:
            assert self.manager.num_available >= self.manager.blocks_to_reserve(seq, len(prompt) - cached)
        self.texts[seq], self.rest[seq], self.salts[seq] = prompt[:cached], prompt[cached:], salt

    @rule(prompt=TOKENS, salt=SALTS, more=TOKENS, end=st.booleans())
    def serve(self, prompt: list[int], salt: str, more: list[int], end: bool) -> None:
        """The whole life of a request, so that much gets cached."""
        self.attach(prompt, salt, True)
        self.write_to(self.next_seq, more, 0)
        self.remember_of(self.next_seq)
        if end:
            self.free_of(self.next_seq)

    @rule()
    def create(self) -> None:
        seq = self.new_seq()
        self.manager.create(seq)
        self.texts[seq], self.rest[seq], self.salts[seq] = [], [], ""

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=TOKENS, reserve_beyond=st.integers(0, 4))
    def write(self, data: st.DataObject, more: list[int], reserve_beyond: int) -> None:
        self.write_to(self.pick(data), more, reserve_beyond)

    def write_to(self, seq: int, more: list[int], reserve_beyond: int) -> None:
        new = self.rest[seq] or more
        wanted = len(new) + reserve_beyond
        needed, before = self.manager.blocks_to_reserve(seq, wanted), self.snapshot()
        if self.manager.allocator.num_free < needed:
            with pytest.raises(OutOfBlocks) as caught:
                self.manager.reserve(seq, wanted)
            error, free = caught.value, self.manager.allocator.num_free
            assert self.snapshot() == before, "a reserve that failed changed something"
            assert (error.needed, error.free, error.evictable) == (needed, free, self.cache.num_evictable)
            if self.manager.num_available < needed:
                return
            self.cache.evict(needed)
        assert self.manager.allocator.num_free >= needed
        copies = self.manager.reserve(seq, wanted)
        for copy in copies:
            self.memory[copy.destination] = self.memory[copy.source].copy()
        table = self.manager.tables[seq]
        for token in new:
            position = len(self.texts[seq])
            block, offset = physical_slot(table, position, BLOCK)
            assert self.manager.allocator.refs[block] == 1, "a block with several owners is written"
            self.texts[seq].append(token)
            self.memory[block][offset] = self.slot(seq, position)
        self.manager.advance(seq, len(new))
        self.rest[seq] = []

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        self.remember_of(self.pick(data))

    def remember_of(self, seq: int) -> None:
        text = self.texts[seq]
        new = self.cache.remember(seq, [*text, *self.rest[seq]])
        table, full = self.manager.tables[seq], len(text) // BLOCK
        if full:
            self.past.append((self.salts[seq], text.copy()))
        if seq in self.stale:
            assert new == 0
        elif self.strong_hash:
            for i in range(full):
                key = expected_key(self.salts[seq], tuple(text[: (i + 1) * BLOCK]))
                assert self.cache.index.blocks.get(key) == table[i], "a full block is not under its key"

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.pick(data), self.new_seq()
        free = self.manager.allocator.num_free
        self.manager.fork(parent, child)
        assert self.manager.allocator.num_free == free
        self.texts[child], self.rest[child] = self.texts[parent].copy(), self.rest[parent].copy()
        self.salts[child] = self.salts[parent]
        if parent in self.stale:
            self.stale.add(child)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        length = data.draw(st.integers(0, len(self.texts[seq])), label="length")
        self.manager.truncate(seq, length)
        del self.texts[seq][length:]
        self.rest[seq] = []
        assert len(self.manager.tables[seq]) == self.manager.blocks_needed(length)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.free_of(self.pick(data))

    def free_of(self, seq: int) -> None:
        self.manager.free(seq)
        for known in (self.texts, self.rest, self.salts):
            del known[seq]
        self.stale.discard(seq)

    @rule(wanted=st.integers(0, NUM_BLOCKS + 2))
    def evict(self, wanted: int) -> None:
        free, evictable = self.manager.allocator.num_free, self.cache.num_evictable
        freed = self.cache.evict(wanted)
        assert freed == max(0, min(wanted - free, evictable))
        assert self.manager.allocator.num_free == free + freed

    @rule()
    def clear(self) -> None:
        held = {block for table in self.manager.tables.values() for block in table}
        still = len(held & set(self.cache.index.blocks.values()))
        assert self.cache.clear() == still
        assert self.cache.num_cached == self.cache.num_evictable == 0
        self.stale = set(self.texts)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        before, allocator = self.snapshot(), self.manager.allocator
        free = allocator.free_blocks()
        calls: list[tuple[type[Exception], Any]] = [
            (UnknownSequence, lambda: self.manager.free("nobody")),
            (UnknownSequence, lambda: self.manager.reserve("nobody", 1)),
            (BlockStateError, lambda: allocator.release(NUM_BLOCKS)),
            (BlockStateError, lambda: allocator.release(-1)),
            (OutOfBlocks, lambda: allocator.allocate_many(len(free) + 1)),
            (InvalidRequest, lambda: self.cache.attach("new", [])),
            (InvalidRequest, lambda: self.cache.attach("new", [0, -1])),
        ]
        if free:
            calls.append((BlockStateError, lambda: allocator.release(free[0])))
            calls.append((BlockStateError, lambda: allocator.share(free[-1])))
        if self.texts:
            seq = self.pick(data)
            room = len(self.manager.tables[seq]) * BLOCK - len(self.texts[seq])
            calls += [
                (SequenceExists, lambda: self.manager.create(seq)),
                (SequenceExists, lambda: self.manager.fork(seq, seq)),
                (SequenceExists, lambda: self.cache.attach(seq, [0])),
                (InvalidRequest, lambda: self.manager.truncate(seq, len(self.texts[seq]) + 1)),
                (InvalidRequest, lambda: self.manager.advance(seq, room + 1)),
                (InvalidRequest, lambda: self.manager.reserve(seq, -1)),
            ]
        for error, call in calls:
            with pytest.raises(error):
                call()
            assert self.snapshot() == before

    # what must hold after every call

    @invariant()
    def accounts_agree(self) -> None:
        self.manager.check()
        allocator = self.manager.allocator
        in_use = {block for table in self.manager.tables.values() for block in table}
        idle = {block for block, flag in enumerate(allocator.cached) if flag} - in_use
        assert allocator.num_free + len(idle) + len(in_use) == NUM_BLOCKS
        assert self.cache.num_evictable == len(idle)
        assert self.manager.num_available == NUM_BLOCKS - len(in_use)

    @invariant()
    def slots_hold_their_prefix(self) -> None:
        for seq, text in self.texts.items():
            table = self.manager.tables[seq]
            assert self.manager.lengths[seq] == len(text)
            for position in range(len(text)):
                block, offset = physical_slot(table, position, BLOCK)
                assert self.memory[block][offset] == self.slot(seq, position)

    @invariant()
    def cached_blocks_hold_their_key(self) -> None:
        for block, flag in enumerate(self.manager.allocator.cached):
            if flag:
                salt, text = self.memory[block][-1]
                assert len(text) % BLOCK == 0
                inner = [(salt, text[: len(text) - BLOCK + 1 + offset]) for offset in range(BLOCK)]
                assert self.memory[block] == inner
                if self.strong_hash:
                    assert self.cache.index.keys[block] == expected_key(salt, text)

    def teardown(self) -> None:
        for seq in list(self.texts):
            self.manager.free(seq)
        self.cache.evict(NUM_BLOCKS)
        assert self.manager.allocator.num_free == NUM_BLOCKS
        assert self.manager.allocator.refs == [0] * NUM_BLOCKS


COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=False)
CacheMachine.TestCase.settings = settings(COMMON, max_examples=60, stateful_step_count=30)
TestCacheMachine = CacheMachine.TestCase


@pytest.mark.skipif(extension is None, reason="the machine above ran in Python already")
def test_the_machine_holds_without_the_native_loops() -> None:
    with loops_in_python():
        run_state_machine_as_test(CacheMachine, settings=settings(COMMON, max_examples=40, stateful_step_count=30))


def test_b11_a_colliding_hash_never_gives_a_wrong_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a digest of 2 bits nearly every key is taken: hits may be missed, never wrong."""

    class WeakHash(CacheMachine):
        strong_hash = False

    monkeypatch.setattr(keys_module, "chain_blocks", IN_PYTHON["chain_blocks"])
    monkeypatch.setattr(keys_module, "sha256", lambda message: bytes([hashlib.sha256(message).digest()[0] & 3]))
    run_state_machine_as_test(WeakHash, settings=settings(COMMON, max_examples=40, stateful_step_count=30))


# The proof that the machine catches what it should: each mutant breaks one rule, and the machine must fail.


class NoCopyOnWrite(KVCacheManager):
    """Writes into shared blocks."""

    def _plan(self, seq: Any, new_tokens: int) -> tuple[list[int], int]:
        shared, missing = super()._plan(seq, new_tokens)
        return shared[:0], missing


class ReplacesWithoutCopying(KVCacheManager):
    """Takes a fresh block for a shared one and forgets to bring its content."""

    def reserve(self, seq: Any, new_tokens: int) -> list[BlockCopy]:
        return super().reserve(seq, new_tokens)[:0]


class KeepsOneReference(KVCacheManager):
    """Forgets one release when a sequence ends."""

    def free(self, seq: Any) -> None:
        if self.tables.get(seq):
            self.allocator.share(self.tables[seq][0])
        super().free(seq)


class LeavesNoToken(BlockIndex):
    """Off by one: a prompt may be reused to its last token."""

    def nearest(self, node: int | None, chain: Any, index: int, most: int) -> tuple[int | None, int]:
        return super().nearest(node, chain, index, most + 1)


class LeavesNoBlock(BlockIndex):
    """Off by one in blocks: a prompt of full blocks may be reused to its last block."""

    def find(self, chain: Any, most: int) -> list[int]:
        return super().find(chain, most + 1)


def key_without_parent(parent: bytes, chunk: bytes, media: Any = ()) -> bytes:  # noqa: ARG001
    return hashlib.sha256(chunk).digest()


def chain_without_parent(parent: bytes, data: bytes, width: int) -> tuple[list[bytes], list[bytes]]:
    chunks = [data[start : start + width] for start in range(0, len(data) // width * width, width)]
    return [key_without_parent(parent, chunk) for chunk in chunks], chunks


def find_by_key_alone(self: BlockIndex, chain: Any, most: int) -> list[int]:
    blocks = [self.blocks.get(key) for key in chain.keys[:most]]
    stop = blocks.index(None) if None in blocks else len(blocks)
    return [block for block in blocks[:stop] if block is not None]


class NoOracleForKeys(CacheMachine):
    """Judges a mutant by the content of slots alone, not by the expected digests."""

    strong_hash = False


@contextmanager
def mutant(name: str) -> Iterator[type[CacheMachine]]:
    class Mutated(NoOracleForKeys if name == "key without parent, trusted" else CacheMachine):  # type: ignore[misc]
        manager_class = {
            "no copy-on-write": NoCopyOnWrite,
            "copy not carried out": ReplacesWithoutCopying,
            "one release skipped": KeepsOneReference,
        }.get(name, KVCacheManager)

    with pytest.MonkeyPatch.context() as patch:
        if name.startswith("attach off by one"):
            patch.setattr(prefix_module, "BlockIndex", LeavesNoBlock if name.endswith("block") else LeavesNoToken)
        if name.startswith("key without parent"):
            patch.setattr(keys_module, "block_key", key_without_parent)
            patch.setattr(keys_module, "chain_blocks", chain_without_parent)
            patch.setattr(index_module, "block_key", key_without_parent)
        if name == "key without parent, trusted":
            patch.setattr(BlockIndex, "find", find_by_key_alone)
            patch.setattr(BlockIndex, "holds", lambda *_: True)
        yield Mutated


MUTANTS = [
    "no copy-on-write",
    "copy not carried out",
    "one release skipped",
    "key without parent",
    "key without parent, trusted",
    "attach off by one",
    "attach off by one block",
]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_machine_catches(name: str) -> None:
    quick = settings(
        COMMON, max_examples=200, stateful_step_count=30, phases=[Phase.generate], derandomize=True, database=None
    )
    with mutant(name) as machine, pytest.raises((AssertionError, BlockStateError, InvalidRequest)):
        run_state_machine_as_test(machine, settings=quick)
