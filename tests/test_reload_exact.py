"""A hot-reloaded server answers token for token as a fresh vLLM started on the version does.

Prompts longer than one KV block (128 tokens on CPU) are asked before and after each reload, so that a stale
prefix cache would show.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from exporter_ranks import Case, build, train
from fresh_engine import KV_CACHE_BYTES, MAX_MODEL_LEN, MAX_TOKENS, ask_fresh_engine
from tiny_model import make_tiny_model

from weightferry.examples.demo_client import PolicyClient, named_versions
from weightferry.examples.demo_jobs import ServerPlan, free_port
from weightferry.exporter.publisher import Publisher
from weightferry.shared.exchange import Exchange

pytestmark = pytest.mark.vllm

NUM_VERSIONS = 3
START_DEADLINE_S = 240.0
SHORT = [f"{i} + {7 * i} = " for i in range(12)]
LONG = [f"{word} " * 30 for word in ("alpha", "bravo", "charlie", "delta", "echo", "fox", "golf", "hotel")]
PROMPTS = SHORT + LONG

Answers = list[list[int]]


def ask(http: httpx.Client, model: str) -> tuple[Answers, set[int]]:
    """Each prompt alone, and the versions that the answers named."""
    answers, versions = [], set()
    for prompt in PROMPTS:
        body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0}
        response = http.post("/v1/completions", json=body | {"return_token_ids": True})
        response.raise_for_status()
        answers.append(response.json()["choices"][0]["token_ids"])
        versions |= named_versions(response.headers)
    return answers, versions


def serve_each(directory: Path, base: Path, apply: str) -> dict[int, Answers]:
    """One live server through all versions; what it answered under each, by number (0: the base)."""
    plan = ServerPlan(
        base=base,
        exchange=directory / "exchange",
        apply=apply,
        port=free_port(),
        log=directory / f"server-{apply}.log",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_bytes=KV_CACHE_BYTES,
        max_lora_rank=8,
    )
    answers: dict[int, Answers] = {}
    http = httpx.Client(base_url=plan.url, timeout=60, trust_env=False)
    with plan.start() as server, PolicyClient(plan.url, str(base)) as client, http:

        def wait_for(number: int) -> None:
            def serves() -> bool:
                status = client.status()
                return status is not None and status["active_version"] == number

            server.wait_until(serves, what=f"it served {number}", deadline_s=START_DEADLINE_S)

        wait_for(0)
        answers[0], named = ask(http, str(base))
        assert named == {0}
        model = build(Case(base=base.name, lora={"target_modules": "all-linear"}), base.parent)
        with Publisher(model, Exchange.open(plan.exchange, base=base)) as publisher:
            for step in range(NUM_VERSIONS):
                train(model, seed=100 + step)
                number = publisher.publish(step).wait().number
                wait_for(number)
                answers[number], named = ask(http, str(base))
                assert named == {number}
    return answers


@pytest.mark.timeout(900)
@pytest.mark.parametrize("apply", ["merged", "adapter"])
def test_reloaded_answers_equal_those_of_a_fresh_vllm(tmp_path, apply):
    base = make_tiny_model(tmp_path / "base")
    answers = serve_each(tmp_path, base, apply)
    versions = Exchange.open(tmp_path / "exchange").versions()
    assert len(versions) == NUM_VERSIONS
    assert answers.keys() == {0, *(version.number for version in versions)}
    for version in versions:
        fresh = (
            ask_fresh_engine(PROMPTS, version.path)
            if apply == "merged"
            else ask_fresh_engine(PROMPTS, base, version.path / "adapter")
        )
        assert answers[version.number] == fresh, f"version {version.number}"
    distinct = {str(tokens) for tokens in answers.values()}
    assert len(distinct) == NUM_VERSIONS + 1  # else a server that reloads nothing would pass
