"""EngineConfig -> an engine that is ready to run. The only place that knows all the parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedkv.attention.backend import choose
from pagedkv.cache.keys import KeyScope
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.policies import make_policy
from pagedkv.cache.pool import KVPool
from pagedkv.cache.prefix import PrefixCache
from pagedkv.config import EngineConfig
from pagedkv.engine.engine import Engine
from pagedkv.engine.extensions import warn_once
from pagedkv.engine.gpu import gpu_runner
from pagedkv.engine.intake import Intake, Limits
from pagedkv.engine.runner import ModelRunner
from pagedkv.engine.sampler import Sampler
from pagedkv.engine.sampling import Sampling
from pagedkv.engine.scheduler import Scheduler
from pagedkv.engine.sizing import PoolPlan, cpu_memory, gpu_memory, plan_pool
from pagedkv.engine.turns import ChatTurns
from pagedkv.model.config import ModelConfig
from pagedkv.model.decoder import Progress
from pagedkv.model.load import LoadedModel, load_model


@dataclass(frozen=True)
class Built:
    """An engine and what it was made of."""

    engine: Engine
    config: EngineConfig
    loaded: LoadedModel
    pool: KVPool
    plan: PoolPlan

    @property
    def banner(self) -> list[str]:
        """What to say at the start, one fact a line."""
        engine = self.engine
        cache, scheduler = self.config.cache, self.config.scheduler
        stored = str(self.pool.data.dtype).removeprefix("torch.")
        caching = (
            f"prefix caching on ({cache.eviction_policy}): prefixes are shared from {cache.block_size} tokens on"
            if cache.enable_prefix_caching
            else "prefix caching off"
        )
        lines = [
            self.loaded.description,
            f"KV pool: {self.pool.num_blocks} blocks of {cache.block_size} tokens, {stored}, "
            f"{self.pool.nbytes / 2**20:.0f} MiB; max_model_len {self.plan.max_model_len}",
            f"{caching}; at most {scheduler.max_num_seqs} sequences and {scheduler.max_num_batched_tokens} tokens "
            f"a step, {scheduler.scheduling_policy}",
            "exact: a token's logits are the same bits whatever it is batched with"
            if engine.exact
            else "not exact: with this backend a token's logits may differ in the last bits from those of a lone run",
        ]
        return [*lines, self.plan.note] if self.plan.note else lines


def build_engine(config: EngineConfig, *, progress: Progress | None = None) -> Built:
    """Loads the model, sizes the pool, puts the parts together. ``progress(done, total)``: bytes of weights."""
    warn_once()
    loaded = load_model(
        config.model,
        tokenizer=config.tokenizer,
        revision=config.revision,
        dtype=config.dtype,
        device=config.device,
        quantization=config.quantization,
        attention_backend=config.attention_backend,
        progress=progress,
    )
    return assemble(config, loaded)


def assemble(config: EngineConfig, loaded: LoadedModel) -> Built:
    """An engine around a model that is loaded already."""
    model = loaded.config
    dtype, device = loaded.model.dtype, torch.device(loaded.model.device)
    shape = (model.num_layers, model.num_kv_heads, config.cache.block_size, model.head_dim)
    block_bytes = KVPool.block_bytes(*shape, dtype=dtype, kv_cache_dtype=config.cache.kv_cache_dtype)
    memory = cpu_memory()
    if device.type == "cuda":
        memory = gpu_memory(
            config.cache.gpu_memory_utilization, *torch.cuda.mem_get_info(device), _activation_bytes(config, model)
        )
    plan = plan_pool(config, trained_len=model.max_position_embeddings, block_bytes=block_bytes, memory=memory)
    pool = KVPool(plan.num_blocks, *shape, dtype=dtype, device=device, kv_cache_dtype=config.cache.kv_cache_dtype)
    manager = KVCacheManager(plan.num_blocks, config.cache.block_size)
    scope = KeyScope(model=loaded.fingerprint, rope=repr(model.rope), dtype=str(dtype), kv_dtype=str(pool.data.dtype))
    policy = make_policy(config.cache.eviction_policy)
    prefix = PrefixCache(manager, scope, policy=policy) if config.cache.enable_prefix_caching else None
    intake = Intake(
        Limits(model.vocab_size, plan.max_model_len, plan.num_blocks * config.cache.block_size),
        loaded.tokenizer,
        scope=None if prefix is None else scope,
        eos_ids=model.eos_token_ids,
        seed=config.seed,
        max_num_seqs=config.scheduler.max_num_seqs,
    )
    sampler = Sampler(model.vocab_size, num_decodable=intake.num_decodable, token_text=loaded.tokenizer.token_text)
    if device.type == "cuda" and choose(config.attention_backend, device).name == "triton":
        runner = gpu_runner(config, loaded.model, model, pool, manager, plan.max_model_len)
    else:
        runner = ModelRunner(loaded.model, pool, manager, config.scheduler.max_num_seqs)
    engine = Engine(
        intake,
        Scheduler(config.scheduler, manager, prefix),
        runner,
        Sampling(sampler, intake.voice),
        turns=ChatTurns(loaded.tokenizer),
        exact=loaded.model.exact,
    )
    return Built(engine, config, loaded, pool, plan)


def _activation_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """A generous bound on what one step needs beside weights and pool."""
    tokens = config.scheduler.max_num_batched_tokens
    width = 8 * model.hidden_size + 4 * model.intermediate_size + 4 * model.num_heads * model.head_dim
    logits = 3 * max(128, config.scheduler.max_num_seqs) * model.vocab_size
    return 4 * (tokens * width + logits) + 512 * 2**20
