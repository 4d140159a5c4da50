"""With two tensor-parallel ranks an apply is one transaction: what one rank cannot load, none keeps.

The ranks talk to each other over loopback alone.

That reloads are exact with two ranks is shown in test_reload_exact.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fresh_engine import ask_fresh_engines, rank_environment
from live_stage import Stage
from network_calls import STRACE, addresses, traced
from processes import hide_from_all_but, titled
from safetensors.torch import load_file, save_file

from weightferry.shared.exchange import Exchange

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["12 + 34 = ", "the policy says: ", "alpha " * 30]
# late in a reload of the base's tensors, and divided between the ranks by its rows
LATE = "model.layers.1.mlp.up_proj.weight"


def halve(file: Path) -> None:
    """Cut the tensor's rows in half: what is left holds the rows of rank 0, and none of rank 1's."""
    tensors = load_file(file)
    save_file(tensors | {LATE: tensors[LATE][: len(tensors[LATE]) // 2].clone()}, file)


def test_a_load_that_fails_on_one_rank_is_undone_on_both(tmp_path):
    stage = Stage(tmp_path)
    file = stage.base_file(LATE)
    whole = shutil.copy(file, tmp_path / "whole")
    flags, calls = ("--tensor-parallel-size", "2"), tmp_path / "calls"
    under = traced(calls, is_detached=True)
    environment = rank_environment(2) | {"WEIGHTFERRY_MAX_TRIES": "1"}  # or it is tried again when mended
    with stage.server("merged", *flags, environment=environment, under=under) as server:
        with stage.training() as training:
            good = training.publish()
        server.wait_for_version(good)
        answers = server.ask_greedy(PROMPTS)

        halve(file)
        with stage.training(["q_proj"]) as training:
            first_bad = training.publish()  # takes the tensor back from the base
        reason = server.wait_for_refusal(first_bad)
        assert "rank 1" in reason
        assert "exceeds dimension size" in reason  # vLLM's own words, in the midst of its loading
        assert server.ask_greedy(PROMPTS) == answers

        shutil.copy(whole, file)
        hide_from_all_but(titled("VLLM::Worker_TP0", server.pid), file)
        with stage.training(["q_proj"]) as training:
            second_bad = training.publish()
        reason = server.wait_for_refusal(second_bad)
        assert "rank 1" in reason
        assert file.name in reason
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
