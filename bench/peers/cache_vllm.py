"""vLLM's KVCacheManager over a trace: what `pagedkv bench cache` does with ours. Runs in a venv of vLLM's own.

    python cache_vllm.py TRACE.jsonl BLOCK_SIZE NUM_BLOCKS [LIMIT] [HASH]

Each request as vLLM's scheduler treats it, less the model: make it (which hashes its blocks), look up, allocate, free.
The prompt's list of token ids is made outside the clock, as it is for ours. The clock is the
thread's processor time. Prints one JSON object.
"""

import gc
import json
import resource
import sys
import time
from itertools import pairwise

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

CHUNK = 512  # tokens that one id of a Mooncake trace stands for
PARTS = ("request_and_hash", "look_up", "allocate", "free")


def main() -> None:
    path, block_size, num_blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    limit = int(sys.argv[4]) if len(sys.argv) > 4 and sys.argv[4] != "0" else None
    hash_name = sys.argv[5] if len(sys.argv) > 5 else "sha256"
    hash_fn = get_hash_fn_by_name(hash_name)
    init_none_hash(hash_fn)
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, 1 << 20, scheduler_block_size=block_size, hash_block_size=block_size)
    hasher = get_request_block_hasher(block_size, hash_fn)
    params = SamplingParams(max_tokens=1)
    seconds = dict.fromkeys(PARTS, 0.0)
    tokens = hits = references = requests = 0
    gc.collect()
    gc.freeze()  # as vLLM's engine does after start-up
    with open(path) as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                break
            entry = json.loads(line)
            length = entry["input_length"]
            prompt = [token for token in entry["hash_ids"] for _ in range(CHUNK)][:length]
            times = [time.thread_time()]
            request = Request(str(number), prompt, params, None, block_hasher=hasher)
            times.append(time.thread_time())
            blocks, cached, _ = manager.get_computed_blocks(request)
            times.append(time.thread_time())
            slots = manager.allocate_slots(request, length - cached, cached, blocks)
            times.append(time.thread_time())
            if slots is None:
                raise SystemExit(f"request {number} did not fit")
            manager.free(request)
            times.append(time.thread_time())
            for part, (begin, end) in zip(PARTS, pairwise(times), strict=True):
                seconds[part] += end - begin
            tokens, hits = tokens + length, hits + cached
            references, requests = references + length // block_size, requests + 1
    total = sum(seconds.values())
    print(
        json.dumps(
            {
                "engine": f"vllm {__import__('vllm').__version__}, {hash_name}",
                "block_size": block_size,
                "num_blocks": num_blocks,
                "requests": requests,
                "token_hit_rate": hits / tokens,
                "block_references": references,
                "seconds": total,
                "us_per_block": 1e6 * total / references,
                "parts_us_per_block": {part: 1e6 * value / references for part, value in seconds.items()},
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
