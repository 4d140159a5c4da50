"""What workers answer is judged answer by answer, be they of one engine or of several data-parallel ones.

The stand-in is as vLLM's client: its `collective_rpc` asks all engines, but shows the first one's answers.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from weightferry.rollout_server.engine import Part, VllmEngine
from weightferry.shared.errors import ApplyError

PARTS = (Part(file="a.safetensors", tensors=("x", "y")),)
Answer = dict[str, Any]


def good(rank: int, num_tensors: int = 2) -> Answer:
    return {"ok": True, "rank": rank, "num_tensors": num_tensors}


def bad(rank: int) -> Answer:
    return {"ok": False, "rank": rank, "error": "OSError: gone"}


class Client:
    """Engines whose workers have these answers, engine by engine."""

    def __init__(self, by_engine: list[list[Answer]]) -> None:
        self._by_engine, self.asked = by_engine, []
        parallel = SimpleNamespace(data_parallel_size=len(by_engine))
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.engine_core = SimpleNamespace(call_utility_all_async=self._ask_all)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Answer]:
        self.asked.append((method, args))
        return self._by_engine[0]

    async def _ask_all(self, utility: str, method: str, timeout: Any, args: Any, kwargs: Any) -> Any:
        assert (utility, timeout, kwargs) == ("collective_rpc", None, None)
        self.asked.append((method, args))
        return self._by_engine


def reload(by_engine: list[list[Answer]]) -> int:
    client = Client(by_engine)
    engine = VllmEngine(client, SimpleNamespace(base_model_paths=()), 60.0)
    try:
        return asyncio.run(engine.reload(PARTS))
    finally:
        plain = [{"file": "a.safetensors", "tensors": ["x", "y"]}]
        assert client.asked == [("weightferry_reload", (plain,))]


@pytest.mark.parametrize("num_engines", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_worker_of_every_engine_must_have_loaded_as_many(num_engines, num_ranks):
    assert reload([[good(rank) for rank in range(num_ranks)] for _ in range(num_engines)]) == 2


@pytest.mark.parametrize(
    ("by_engine", "words"),
    [
        ([[bad(0)]], "failed on rank 0: OSError: gone"),
        ([[good(0), bad(1)]], "failed on rank 1: OSError: gone"),
        ([[good(0)], [bad(0)]], "failed on rank 0 of engine 1: OSError: gone"),
        ([[good(0), good(1)], [good(0), bad(1)]], "failed on rank 1 of engine 1"),
        ([[good(0)], [good(0)], [bad(0)]], "failed on rank 0 of engine 2"),
        ([[good(0), good(1, 1)]], r"different numbers of tensors: \[1, 2\]"),
        ([[good(0)], [good(0, 1)]], r"different numbers of tensors: \[1, 2\]"),
    ],
)
def test_one_worker_that_did_not_makes_the_apply_fail(by_engine, words):
    with pytest.raises(ApplyError, match=words):
        reload(by_engine)
