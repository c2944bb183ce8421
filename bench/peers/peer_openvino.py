"""OpenVINO GenAI: it reads the GGUF itself (F16) and runs it in bf16, with continuous batching and its prefix cache."""

import sys
import time

began = time.perf_counter()
import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai as genai  # noqa: E402
from report import measure, workload  # noqa: E402

work = workload()
scheduler = genai.SchedulerConfig()
scheduler.cache_size = 2
scheduler.max_num_seqs = 32
scheduler.max_num_batched_tokens = 2048
scheduler.enable_prefix_caching = work["prefix_caching"]
pipeline = genai.LLMPipeline(
    sys.argv[1],
    "CPU",
    scheduler_config=scheduler,
    INFERENCE_PRECISION_HINT="bf16",
    INFERENCE_NUM_THREADS=2,
    PERFORMANCE_HINT="LATENCY",
)


def run(prompts: list[list[int]], new: int) -> list[list[int]]:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
    width = max(map(len, prompts))
    ids = np.array([[0] * (width - len(p)) + p for p in prompts], np.int64)
    mask = np.array([[0] * (width - len(p)) + [1] * len(p) for p in prompts], np.int64)
    out = pipeline.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask)), config)
    return [list(tokens) for tokens in out.tokens]


measure("OpenVINO GenAI F16", began, run, work)
