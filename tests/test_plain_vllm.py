"""vLLM's own command, with the flags and variables that docs/operations.md gives, is the same server."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from fresh_engine import KV_CACHE_BYTES, MAX_MODEL_LEN
from live_stage import Stage
from vllm_server import APPLY_DEADLINE_S, MODEL, plan_server, running

from weightferry.rollout_server.engine import WORKER_EXTENSION
from weightferry.rollout_server.plugin import MIDDLEWARE

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN = "a-long-secret"
PROMPTS = ("12 + 34 = ", "alpha " * 30)
OURS = {
    "--worker-extension-cls": WORKER_EXTENSION,
    "--middleware": MIDDLEWARE,
    "--api-server-count": "1",
}


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def plain_command(stage: Stage, port: int, ours: dict[str, str], *flags: str) -> list[str]:
    """As `vllm serve BASE ...`, which the CPU wheel of 0.32 does not have; nothing of ours starts it."""
    base = str(stage.servers_base)
    given = [word for flag in ours.items() for word in flag]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", base, *given, *flags]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--enforce-eager"]
    sizes = {"--max-model-len": MAX_MODEL_LEN, "--kv-cache-memory-bytes": KV_CACHE_BYTES}
    return [*command, *(str(word) for flag in sizes.items() for word in flag)]


def environment_of(stage: Stage, apply: str, **more: str) -> dict[str, str]:
    plan = plan_server(stage.directory, stage.servers_base, stage.exchange, apply)
    variables = {
        "VLLM_PLUGINS": "weightferry",
        "WEIGHTFERRY_EXCHANGE": str(stage.exchange),
        "WEIGHTFERRY_APPLY": apply,
        "WEIGHTFERRY_POLL_INTERVAL_S": "0.1",
        "WEIGHTFERRY_TOKEN": TOKEN,
    }
    return plan.environment() | variables | more


@pytest.mark.parametrize(
    ("apply", "flags"), [("merged", ()), ("adapter", ("--enable-lora", "--max-lora-rank", "8"))]
)
def test_a_plain_vllm_with_the_plugin_is_the_same_server(stage, apply, flags):
    with stage.training() as training:
        first = training.publish()
        second = training.publish()
    with stage.server(apply) as ours:
        ours.wait_for_version(second)
        expected = ours.ask_greedy(PROMPTS)
    plan = plan_server(stage.directory, stage.servers_base, stage.exchange, apply, "plain")
    command = plain_command(stage, plan.port, OURS, *flags)
    with running(plan, command, environment_of(stage, apply, WEIGHTFERRY_PAUSE_MODE="wait")) as plain:
        status = plain.status()
        assert (status["active_version"], status["pause_mode"]) == (second, "wait")  # before it listened
        assert plain.ask_greedy(PROMPTS) == expected
        headers = {"authorization": f"Bearer {TOKEN}"}
        assert plain.http.post("/weightferry/rollback", json={"number": first}).status_code == 401
        plain.http.post("/weightferry/rollback", json={"number": first}, headers=headers).raise_for_status()
        answers, versions = plain.ask_greedy(PROMPTS)
        assert versions == {first}
        assert answers != expected[0]
        body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 1}
        wanted = {"x-weightferry-version": str(second)}
        assert plain.http.post("/v1/completions", json=body, headers=wanted).status_code == 409
        assert "weightferry_active_version" in plain.http.get("/metrics").text
        plain.http.post("/weightferry/unpin", headers=headers).raise_for_status()
        plain.wait_for_version(second, APPLY_DEADLINE_S)
        assert plain.ask_greedy(PROMPTS) == expected


@pytest.mark.parametrize(
    ("missing", "words"),
    [("--middleware", "answers would not name their version"), ("--worker-extension-cls", "start vLLM with")],
)
def test_a_plain_vllm_that_lacks_a_flag_of_ours_says_which_and_does_not_start(stage, missing, words):
    ours = {flag: value for flag, value in OURS.items() if flag != missing}
    done = subprocess.run(
        plain_command(stage, plan_server(stage.directory, stage.base, stage.exchange, "merged").port, ours),
        env=os.environ | environment_of(stage, "merged"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode != 0
    assert re.search(f"UnsupportedError: .*{words}.* {missing} {OURS[missing]}", done.stderr), done.stderr[
        -3000:
    ]
