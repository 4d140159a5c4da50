"""A plain vLLM, without anything of ours, started on a directory: the reference for every reload.

`python tests/fresh_engine.py MODEL [ADAPTER]` reads JSON prompts from standard input, answers each greedily,
one at a time, and prints the token ids as JSON after the line "ANSWERS".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 240
MAX_TOKENS = 16
MAX_MODEL_LEN = 512
KV_CACHE_BYTES = 32 << 20
QUICK_START = {
    "OMP_NUM_THREADS": "1",  # equal bits whatever the batch
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
}


def ask_fresh_engine(prompts: list[str], model: Path, adapter: Path | None = None) -> list[list[int]]:
    """Token ids that a new vLLM process on `model` (with `adapter`) gives for each prompt."""
    command = [sys.executable, __file__, str(model), *([str(adapter)] if adapter else [])]
    done = subprocess.run(
        command,
        input=json.dumps(prompts),
        env=os.environ | QUICK_START,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("ANSWERS\n")[2])


def main() -> None:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    torch.cpu._init_amx()  # vLLM 0.32 uses AMX without asking Linux for it; see rollout_server/engine.py
    prompts = json.load(sys.stdin)
    adapter = LoRARequest("fresh", 1, sys.argv[2]) if len(sys.argv) > 2 else None
    engine = LLM(
        sys.argv[1],
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        enable_lora=adapter is not None,
        max_lora_rank=8,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    answers = []
    for prompt in prompts:
        (output,) = engine.generate([prompt], greedy, lora_request=adapter, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    print("ANSWERS", json.dumps(answers), sep="\n", flush=True)


if __name__ == "__main__":
    main()
