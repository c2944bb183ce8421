"""vLLM on the CPU: its engine as it comes, bf16, two threads (run with VLLM_CPU_KVCACHE_SPACE=2)."""

import sys
import time

began = time.perf_counter()
from report import measure, workload  # noqa: E402


def main() -> None:
    from vllm import LLM, SamplingParams

    work = workload()
    llm = LLM(
        sys.argv[1],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=work["prefix_caching"],
        max_model_len=2048,
        max_num_seqs=32,
        disable_log_stats=True,
    )

    def run(prompts: list[list[int]], new: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    measure("vLLM-cpu bf16", began, run, work)


if __name__ == "__main__":
    main()
