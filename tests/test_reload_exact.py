"""A hot-reloaded server answers token for token as a fresh vLLM on the version does (field case 2).

Prompts longer than one KV block (128 tokens on CPU) are asked before and after each reload, so that a stale
prefix cache would show.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from exporter_ranks import Case, build, train
from fresh_engine import ask_fresh_engines, rank_environment
from tiny_model import make_tiny_model
from vllm_server import Answers, live_server

from weightferry.exporter.publisher import Publisher
from weightferry.shared.exchange import Exchange

pytestmark = pytest.mark.vllm

# everything changes; then all but the queries goes back to the base; then the queries alone change
TARGETS = ("all-linear", ["q_proj"], ["q_proj"])
NUM_APPLIED = {
    "merged": (20, 20, 12),
    "fold": (20, 20, 12),
    "adapter": (28, 4, 4),
}  # the queries with keys, values and biases
SHORT = [f"{i} + {7 * i} = " for i in range(12)]
LONG = [f"{word} " * 30 for word in ("alpha", "bravo", "charlie", "delta", "echo", "fox", "golf", "hotel")]
PROMPTS = SHORT + LONG


def serve_each(directory: Path, base: Path, apply: str, num_ranks: int) -> dict[int, Answers]:
    """One live server through all versions; what it answered under each, by number (0: the base)."""
    answers: dict[int, Answers] = {}
    exchange = directory / "exchange"
    flags = ("--tensor-parallel-size", str(num_ranks)) if num_ranks > 1 else ()
    environment = rank_environment(num_ranks) if num_ranks > 1 else None
    with live_server(directory, base, exchange, apply, *flags, environment=environment) as server:
        answers[0], named = server.ask_greedy(PROMPTS)
        assert named == {0}
        for step, targets in enumerate(TARGETS):
            model = build(Case(base=base.name, lora={"target_modules": targets}), base.parent)
            train(model, seed=100 + step)
            with Publisher(model, Exchange.open(exchange, base=base)) as publisher:
                number = publisher.publish(step).wait().number
            status = server.wait_for_version(number)
            answers[number], named = server.ask_greedy(PROMPTS)
            assert named == {number}
            assert status["applied"][-1]["tensors_applied"] == NUM_APPLIED[apply][step]
    return answers


@pytest.mark.timeout(900)
@pytest.mark.parametrize("apply", ["merged", "fold", "adapter"])
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_reloaded_answers_equal_those_of_a_fresh_vllm(tmp_path, apply, num_ranks):
    base = make_tiny_model(tmp_path / "base")
    answers = serve_each(tmp_path, base, apply, num_ranks)
    versions = Exchange.open(tmp_path / "exchange").versions()
    assert len(versions) == len(TARGETS)
    assert answers.keys() == {0, *(version.number for version in versions)}
    starts = [(base, v.path / "adapter") if apply == "adapter" else (v.path, None) for v in versions]
    for version, fresh in zip(versions, ask_fresh_engines(PROMPTS, starts, num_ranks=num_ranks), strict=True):
        assert answers[version.number] == fresh, f"version {version.number}"
    distinct = {str(tokens) for tokens in answers.values()}
    assert len(distinct) == len(TARGETS) + 1  # else a server that reloads nothing would pass
