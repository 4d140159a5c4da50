"""Plain vLLM engines, without anything of ours, each started on one directory: the reference for reloads.

`python tests/fresh_engine.py` reads `{"prompts": [...], "starts": [[model, adapter or null], ...],
"num_ranks": 1}` from standard input, starts a new engine for each start, asks it the prompts greedily, one at
a time, and prints the token ids as one line of JSON after the line "ANSWERS".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DEADLINE_S = 240
MAX_TOKENS = 16
MAX_MODEL_LEN = 1024
KV_CACHE_BYTES = 32 << 20
QUICK_START = {
    "OMP_NUM_THREADS": "1",  # equal bits whatever the batch
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
}


def ask_fresh_engines(
    prompts: list[str], starts: Sequence[tuple[Path, Path | None]], *, num_ranks: int = 1
) -> list[list[list[int]]]:
    """Token ids for each prompt, for each start: a model's directory, and an adapter's or None."""
    plain = [(str(model), adapter and str(adapter)) for model, adapter in starts]
    return said_by(
        __file__,
        "ANSWERS",
        given={"prompts": prompts, "starts": plain, "num_ranks": num_ranks},
        environment=fresh_ranks(num_ranks) if num_ranks > 1 else {},
    )


def said_by(
    script: str,
    mark: str,
    *arguments: str,
    given: Any = None,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> Any:
    """The line of JSON after the line `mark`, from a script that starts engines; `given` is its input."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        input=json.dumps(given),
        env=os.environ | QUICK_START | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    # what follows are the farewells of ranks
    return json.loads(done.stdout.rpartition(f"{mark}\n")[2].splitlines()[0])


def rank_environment(num_ranks: int) -> dict[str, str]:
    """A core for each tensor-parallel rank: by itself vLLM on CPU wants a NUMA node for each (0.32)."""
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(num_ranks))
    return {"VLLM_CPU_OMP_THREADS_BIND": bound}


def fresh_ranks(num_ranks: int) -> dict[str, str]:
    """Our plug-in does nothing here but ask Linux for AMX in every rank; see rollout_server/engine.py."""
    return rank_environment(num_ranks) | {"VLLM_PLUGINS": "weightferry"}


def main() -> None:
    import torch
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    torch.cpu._init_amx()  # vLLM 0.32 uses AMX without asking Linux for it; see rollout_server/engine.py
    request = json.load(sys.stdin)
    answers = []
    for model, adapter in request["starts"]:
        answers.append(ask(model, adapter, request["prompts"], request["num_ranks"]))
        cleanup_dist_env_and_memory()
    print("ANSWERS", json.dumps(answers), sep="\n", flush=True)


def ask(model: str, adapter: str | None, prompts: list[str], num_ranks: int) -> list[list[int]]:
    """Start an engine, ask it, and let it go."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(
        model,
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        enable_lora=adapter is not None,
        max_lora_rank=8,
        tensor_parallel_size=num_ranks,
    )
    lora = LoRARequest("fresh", 1, adapter) if adapter else None
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    return [
        list(engine.generate([prompt], greedy, lora_request=lora, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in prompts
    ]


if __name__ == "__main__":
    main()
