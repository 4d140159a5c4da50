"""Two data-parallel engines behind one server: an apply is one transaction of both, by loopback alone.

Each engine is asked by itself, by vLLM's header x-data-parallel-rank.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from fresh_engine import ask_fresh_engines, rank_environment
from live_stage import Stage
from network_calls import STRACE, addresses, traced
from processes import descendants, titled
from vllm_server import APPLY_DEADLINE_S, Answers, LiveServer
from worker_faults import Faults

from weightferry.shared.exchange import Exchange

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["12 + 34 = ", "the policy says: ", "alpha " * 30]
FLAGS = ("--data-parallel-size", "2")
LOOPBACK = {"127.0.0.1", "::1"}


def ask_both(server: LiveServer, number: int) -> Answers:
    """What both engines answer, which must be the same and of this version."""
    first, second = (server.ask_greedy(PROMPTS, engine) for engine in range(2))
    assert first == second
    assert first[1] == {number}
    return first[0]


def worker_of(engine: int, server: LiveServer) -> int:
    """The process of this engine's only rank."""
    return titled("VLLM::Worker", titled(f"VLLM::EngineCore_DP{engine}", server.pid))


@pytest.mark.parametrize("apply", ["merged", "adapter"])
def test_both_engines_answer_with_each_version_and_keep_it_when_one_cannot_load_the_next(tmp_path, apply):
    stage, faults = Stage(tmp_path), Faults(tmp_path)
    calls = tmp_path / "calls"
    under = traced(calls, is_detached=True)
    environment = faults.environment | rank_environment(2) | {"WEIGHTFERRY_MAX_TRIES": "1"}
    with stage.server(apply, *FLAGS, environment=environment, under=under) as server:
        with stage.training() as training:
            good = training.publish()
        server.wait_for_version(good)
        answers = ask_both(server, good)
        if apply == "merged":
            faults.fail(15, engine=1)
            check_undone_on_both(stage, server, good, answers)
        with stage.training() as training:
            newest = training.publish()
        server.wait_for_version(newest)
        newest_answers = ask_both(server, newest)
        check_listens_on_loopback(server)
        lose_an_engine(server)
    if STRACE is not None:  # torch asks the host's resolver what 127.0.0.1 is called
        assert addresses(calls, "connect") - name_servers() <= {*LOOPBACK, "::ffff:127.0.0.1"}
    exchange = Exchange.open(stage.exchange)
    versions = [exchange.version(number).path for number in (good, newest)]
    starts = [(stage.base, v / "adapter") if apply == "adapter" else (v, None) for v in versions]
    assert ask_fresh_engines(PROMPTS, starts) == [answers, newest_answers]
    assert answers != newest_answers


def check_undone_on_both(stage: Stage, server: LiveServer, good: int, answers: Answers) -> None:
    with stage.training() as training:
        bad = training.publish()
    reason = server.wait_for_refusal(bad)
    assert "rank 0 of engine 1: OSError: a fault of the test's at tensor 15" in reason
    assert ask_both(server, good) == answers


def check_listens_on_loopback(server: LiveServer) -> None:
    processes = [psutil.Process(pid) for pid in (server.pid, *descendants(server.pid))]
    sockets = [found for process in processes for found in process.net_connections("inet")]
    listening = [found.laddr.ip for found in sockets if found.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) <= LOOPBACK


def name_servers() -> set[str]:
    lines = [line.split() for line in Path("/etc/resolv.conf").read_text().splitlines()]
    return {words[1] for words in lines if words[:1] == ["nameserver"]}


def lose_an_engine(server: LiveServer) -> None:
    """Without one of its engines the server has no answer any more."""
    os.kill(worker_of(1, server), signal.SIGKILL)
    deadline = time.monotonic() + APPLY_DEADLINE_S
    while True:
        try:
            server.ask_greedy(PROMPTS[:1])
        except httpx.ConnectError:
            return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, "the server outlives its engine"
        time.sleep(0.1)
