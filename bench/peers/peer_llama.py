"""llama.cpp through llama-cpp-python's low-level calls: one context, a batch of all sequences, greedy by argmax.

With prefix caching the shared prefix is computed once and copied to the other sequences, as its server would reuse it.
"""

import sys
import time

began = time.perf_counter()
import ctypes  # noqa: E402
import os  # noqa: E402

import llama_cpp as ll  # noqa: E402
import numpy as np  # noqa: E402
from report import measure, workload  # noqa: E402

work = workload()
prompts_ = work["prompts"]
num_seqs = max(4, len(prompts_))
ll.llama_backend_init()
log = ll.llama_log_callback(lambda *_: None)
ll.llama_log_set(log, ctypes.c_void_p(0))
mparams = ll.llama_model_default_params()
model = ll.llama_model_load_from_file(sys.argv[1].encode(), mparams)
cparams = ll.llama_context_default_params()
cparams.n_ctx = sum(len(p) + work["new_tokens"] + 32 for p in prompts_) + 4 * 128
cparams.n_batch, cparams.n_ubatch, cparams.n_seq_max = 2048, int(os.environ.get("LLAMA_UBATCH", "512")), num_seqs
cparams.n_threads = cparams.n_threads_batch = 2
cparams.kv_unified = True
if len(prompts_) > 1 and not work["prefix_caching"]:  # each sequence in a cache of its own: faster here
    cparams.kv_unified = False
    cparams.n_ctx = num_seqs * (max(map(len, prompts_)) + work["new_tokens"] + 32)
context = ll.llama_init_from_model(model, cparams)
memory = ll.llama_get_memory(context)
vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
batch = ll.llama_batch_init(2048, 0, 1)
cached: list[int] = []


def decode(rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
    """Rows of (token, position, sequence, wants logits); the next token of each sequence that wants one."""
    batch.n_tokens = len(rows)
    for i, (token, position, seq, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
        batch.seq_id[i][0] = seq
    if ll.llama_decode(context, batch) != 0:
        raise RuntimeError("llama_decode failed")
    chosen = {}
    for i, (_, _, seq, wanted) in enumerate(rows):
        if wanted:
            logits = np.ctypeslib.as_array(ll.llama_get_logits_ith(context, i), (vocabulary,))
            chosen[seq] = int(logits.argmax())
    return chosen


def prefill(rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
    chosen: dict[int, int] = {}
    for start in range(0, len(rows), 2048):
        chosen |= decode(rows[start : start + 2048])
    return chosen


def run(prompts: list[list[int]], new: int) -> list[list[int]]:
    global cached
    shared = 0
    if work["prefix_caching"] and len(prompts) > 1:
        while all(len(p) > shared + 1 and p[shared] == prompts[0][shared] for p in prompts):
            shared += 1
    prefix = prompts[0][:shared]
    if not shared or cached != prefix:
        ll.llama_memory_clear(memory, True)
        cached = prefix
        prefill([(t, i, 0, False) for i, t in enumerate(prefix)])
        for seq in range(1, len(prompts) if shared else 1):
            ll.llama_memory_seq_cp(memory, 0, seq, 0, shared)
    else:
        for seq in range(len(prompts)):
            ll.llama_memory_seq_rm(memory, seq, shared, -1)
    rows = [(t, i, seq, i == len(p) - 1) for seq, p in enumerate(prompts) for i, t in enumerate(p) if i >= shared]
    last = prefill(rows)
    generated = [[last[seq]] for seq in range(len(prompts))]
    for step in range(new - 1):
        last = decode([(last[seq], len(p) + step, seq, True) for seq, p in enumerate(prompts)])
        for seq, token in last.items():
            generated[seq].append(token)
    return generated


name = "Q4_1" if "Q4_1" in sys.argv[1] else "BF16"
measure(f"llama.cpp {name}", began, run, work)
