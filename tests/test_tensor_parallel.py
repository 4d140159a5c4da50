"""With two tensor-parallel ranks an apply is one transaction: what one rank cannot load, none keeps.

The ranks talk to each other over loopback alone.

That reloads are exact with two ranks is shown in test_reload_exact.py.
"""

from __future__ import annotations

import pytest
from fresh_engine import ask_fresh_engines, rank_environment
from live_stage import Stage
from network_calls import STRACE, addresses, traced
from worker_faults import Faults

from weightferry.shared.exchange import Exchange

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["12 + 34 = ", "the policy says: ", "alpha " * 30]


def test_a_load_that_fails_on_one_rank_is_undone_on_both(tmp_path):
    stage, faults = Stage(tmp_path), Faults(tmp_path)
    flags, calls = ("--tensor-parallel-size", "2"), tmp_path / "calls"
    under = traced(calls, is_detached=True)
    environment = faults.environment | rank_environment(2) | {"WEIGHTFERRY_MAX_TRIES": "1"}
    with stage.server("merged", *flags, environment=environment, under=under) as server:
        with stage.training() as training:
            good = training.publish()
        server.wait_for_version(good)
        answers = server.ask_greedy(PROMPTS)

        faults.fail(15, rank=1)
        with stage.training() as training:
            bad = training.publish()
        reason = server.wait_for_refusal(bad)
        assert "rank 1: OSError: a fault of the test's at tensor 15" in reason
        assert server.ask_greedy(PROMPTS) == answers

        with stage.training() as training:
            newest = training.publish()
        server.wait_for_version(newest)
        newest_answers, versions = server.ask_greedy(PROMPTS)
    assert versions == {newest}
    if STRACE is not None:
        assert addresses(calls, "connect") <= {"127.0.0.1", "::1"}
    exchange = Exchange.open(stage.exchange)
    starts = [(exchange.version(number).path, None) for number in (good, newest)]
    assert ask_fresh_engines(PROMPTS, starts, num_ranks=2) == [answers[0], newest_answers]
    assert answers[0] != newest_answers
