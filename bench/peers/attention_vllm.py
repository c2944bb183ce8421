"""vLLM's CPU attention kernel, by request: reads one JSON object a line and answers with one. Runs in vLLM's own venv.

    {"do": "prepare", "batch": 8, "context": 2048, "kv_heads": 4, "group": 3, "head_dim": 64, "block_size": 128,
     "layers": 6}                 ->  {"isa": "vec", "error": 0.003, "bytes": 100663296}
    {"do": "run"}                 ->  {"seconds": 0.021}      one decode call for every layer

It is called as vLLM's own backend calls it (vllm/v1/attention/backends/cpu_attn.py): keys and values are written by its
reshape-and-cache, the scheduler's metadata is made once for all layers, the KV may be split. Tables are scattered.
``error`` is the largest difference to a float32 softmax over the same numbers, relative to the largest value.
``attention.py`` asks.
"""

import json
import sys
import time

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa


class Decode:
    """One new token for each of ``batch`` sequences of ``context``; a cache for every layer."""

    def __init__(self, case: dict) -> None:
        torch.manual_seed(0)
        batch, context, size, dim = (case[name] for name in ("batch", "context", "block_size", "head_dim"))
        self.heads, self.kv_heads, self.scale = case["kv_heads"] * case["group"], case["kv_heads"], dim**-0.5
        self.isa = _get_attn_isa(torch.bfloat16, size, dim, "auto")
        width = -(-context // size)
        self.table = torch.randperm(batch * width).reshape(batch, width).to(torch.int32)
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32)
        self.query_start = torch.arange(batch + 1, dtype=torch.int32)
        self.q = torch.randn(batch, self.heads, dim).bfloat16()
        self.out = torch.empty_like(self.q)
        position = torch.arange(context)
        slots = (self.table[:, position // size].long() * size + position % size).flatten()
        self.caches = []
        for layer in range(case["layers"]):
            cache = torch.zeros((batch * width, self.kv_heads, 2 * size, dim), dtype=torch.bfloat16)
            k, v = (torch.randn(batch * context, self.kv_heads, dim).bfloat16() for _ in range(2))
            ops.cpu_attn_reshape_and_cache(k, v, *cache.chunk(2, dim=2), slots, self.isa)
            self.caches.append(cache)
            if layer == 0:
                self.first = (k, v)
        self.metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=dim,
            seq_lens=self.seq_lens,
            dtype=torch.bfloat16,
            query_start_loc=self.query_start,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )

    def attend(self, layer: int) -> torch.Tensor:
        k_cache, v_cache = self.caches[layer].chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=self.q,
            key_cache=k_cache,
            value_cache=v_cache,
            output=self.out,
            query_start_loc=self.query_start,
            seq_lens=self.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.table,
            softcap=0,
            scheduler_metadata=self.metadata,
            s_aux=None,
        )
        return self.out

    def error(self) -> float:
        k, v = (x.float().view(len(self.q), -1, *x.shape[1:]).transpose(1, 2) for x in self.first)
        q = self.q.float().view(len(self.q), self.kv_heads, -1, self.q.shape[-1])
        want = ((q @ k.transpose(2, 3) * self.scale).softmax(-1) @ v).flatten(1, 2)
        return float((self.attend(0).float() - want).abs().max() / want.abs().max().clamp(min=1))

    def run(self) -> float:
        start = time.perf_counter()
        for layer in range(len(self.caches)):
            self.attend(layer)
        return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps({"vllm": __import__("vllm").__version__}), flush=True)
    decode = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "prepare":
            decode = None  # its memory goes first
            decode = Decode(request)
            size = sum(cache.nbytes for cache in decode.caches)
            answer = {"isa": decode.isa, "error": decode.error(), "bytes": size}
        else:
            answer = {"seconds": decode.run()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
