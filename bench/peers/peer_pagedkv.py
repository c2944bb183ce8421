"""pagedkv itself, as it comes; the last argument but one may name a quantization (int4, int8)."""

import sys
import time

began = time.perf_counter()
from report import measure, workload  # noqa: E402

from pagedkv import LLM, SamplingParams  # noqa: E402

work = workload()
quantization = sys.argv[2] if len(sys.argv) > 3 else None
need = sum(len(prompt) + work["new_tokens"] for prompt in work["prompts"]) // 16 + len(work["prompts"]) + 16
llm = LLM(
    sys.argv[1],
    quantization=quantization,
    dtype="bfloat16",
    enable_prefix_caching=work["prefix_caching"],
    num_gpu_blocks_override=max(need, 256),
    max_model_len=2048,
)


def run(prompts: list[list[int]], new: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


measure(f"pagedkv {quantization or 'bf16'}", began, run, work)
