"""One engine that reloads from version to version, and a fresh one on each: what both say to equal prompts.

`python tests/reloaded_engine.py` reads `{"base": directory, "versions": [directory, ...]}` from standard
input, all complete checkpoints, and prints as one line of JSON after the line "FOUND" whether a rollout
server would refuse to start on this engine, what an engine that was started on the base says before and after
each reload, and what engines that were started on each of these directories say. Only what differs is
reloaded, as the rollout server plans it. An answer is token ids, and the log probabilities of all tokens, of
the prompt, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fresh_engine import KV_CACHE_BYTES, said_by

from weightferry.rollout_server.engine import WORKER_EXTENSION, Part
from weightferry.rollout_server.self_check import require_faithful_reload
from weightferry.rollout_server.weights import WeightSet, plan_reload
from weightferry.shared.base import identify_base
from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.errors import UnsupportedError

PROMPTS = ([5, 6, 7, 8, 9, 10], list(range(3, 60)))
MAX_TOKENS = 8
Answers = list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Answers are of the base and each version, in this order; `refusal`: of the self-check, or None."""

    refusal: str | None
    reloaded: list[Answers]
    fresh: list[Answers]


def reload_and_start_anew(base: Path, versions: list[Path]) -> Found:
    given = {"base": str(base), "versions": [str(path) for path in versions]}
    return Found(**said_by(__file__, "FOUND", given=given))


def main() -> None:
    import torch
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    torch.cpu._init_amx()  # vLLM 0.32 uses AMX without asking Linux for it; see rollout_server/engine.py
    request = json.load(sys.stdin)
    paths = [Path(path) for path in (request["base"], *request["versions"])]
    refusal, reloaded = ask_after_each_reload(paths)
    cleanup_dist_env_and_memory()
    fresh = []
    for path in paths:
        fresh.append(ask(start(path)))
        cleanup_dist_env_and_memory()
    found = Found(refusal=refusal, reloaded=reloaded, fresh=fresh)
    print("FOUND", json.dumps(asdict(found)), sep="\n", flush=True)


class InProcess:
    """As much of the rollout server's Engine as reloads need, on vLLM's engine in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def weight_checksums(self) -> dict[str, str]:
        (checksums,) = self._llm.collective_rpc("compute_weight_checksums")
        return checksums

    async def reload(self, parts: tuple[Part, ...]) -> int:
        return self._reload("weightferry_reload", parts)

    async def reload_from_zero(self, parts: tuple[Part, ...]) -> int:
        return self._reload("weightferry_reload_from_zero", parts)

    def _reload(self, method: str, parts: tuple[Part, ...]) -> int:
        (answer,) = self._llm.collective_rpc(method, args=([asdict(part) for part in parts],))
        assert answer["ok"], answer
        self._llm.reset_prefix_cache()
        return answer["num_tensors"]


def ask_after_each_reload(paths: list[Path]) -> tuple[str | None, list[Answers]]:
    checkpoints = [Checkpoint.open(path) for path in paths]
    digests = [identify_base(found)[1] for found in checkpoints]
    sets = [WeightSet.of_base(*found) for found in zip(checkpoints, digests, strict=True)]
    llm = start(paths[0])
    engine = InProcess(llm)
    answers, refusal = [ask(llm)], None
    try:
        asyncio.run(require_faithful_reload(engine, checkpoints[0], digests[0]))
    except UnsupportedError as error:
        refusal = str(error)
    for active, wanted in pairwise(sets):
        plan = plan_reload(active, wanted, checkpoints[0].specs)
        assert asyncio.run(engine.reload(plan.parts)) == plan.num_tensors
        answers.append(ask(llm))
    return refusal, answers


def start(directory: Path) -> Any:
    from vllm import LLM

    return LLM(
        str(directory),
        enforce_eager=True,
        max_model_len=80,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
        worker_extension_cls=WORKER_EXTENSION,
    )


def ask(engine: Any) -> Answers:
    from vllm import SamplingParams

    exact: dict[str, Any] = {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 0}
    greedy = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, **exact)
    answers = []
    for prompt in PROMPTS:
        (found,) = engine.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        (output,) = found.outputs
        of_tokens = [*found.prompt_logprobs[1:], *output.logprobs]
        answers.append([list(output.token_ids), [next(iter(entry.values())).logprob for entry in of_tokens]])
    return answers


if __name__ == "__main__":
    main()
