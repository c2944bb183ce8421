"""transformers: one padded batch, greedy. No paged cache and no prefix cache; W3 only without."""

import sys
import time

began = time.perf_counter()
import torch  # noqa: E402
from report import measure, workload  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

torch.set_num_threads(2)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()


@torch.inference_mode()
def run(prompts: list[list[int]], new: int) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, width:].tolist()


measure("transformers bf16", began, run, workload())
