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
from safetensors.torch import load_file, save_file

from weightferry.shared.exchange import Exchange

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["12 + 34 = ", "the policy says: ", "alpha " * 30]
# late in a reload of the base's tensors, and divided between the ranks by its rows
LATE = "model.layers.1.mlp.up_proj.weight"


def process_of_first_rank(api_server: int) -> int:
    """The process whose title says that it is worker 0 of this server."""
    for process in Path("/proc").glob("[0-9]*"):
        if (process / "comm").read_text().startswith("VLLM::Worker_TP"):
            title = (process / "cmdline").read_bytes().rstrip(b"\0")
            if title == b"VLLM::Worker_TP0" and is_below(int(process.name), api_server):
                return int(process.name)
    raise AssertionError("there is no process of rank 0")


def is_below(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def halve(file: Path) -> None:
    """Cut the tensor's rows in half: what is left holds the rows of rank 0, and none of rank 1's."""
    tensors = load_file(file)
    save_file(tensors | {LATE: tensors[LATE][: len(tensors[LATE]) // 2].clone()}, file)


def hide_from_all_but(pid: int, file: Path) -> None:
    """Let only this process find the file: the link leads through a thread of its own."""
    there = file.with_name(f"{file.name}-moved")
    file.rename(there)
    file.symlink_to(f"/proc/self/task/{pid}/root{there}")


def test_a_load_that_fails_on_one_rank_is_undone_on_both(tmp_path):
    stage = Stage(tmp_path)
    file = stage.base_file(LATE)
    whole = shutil.copy(file, tmp_path / "whole")
    flags, calls = ("--tensor-parallel-size", "2"), tmp_path / "calls"
    under = traced(calls, is_detached=True)
    with stage.server("merged", *flags, environment=rank_environment(2), under=under) as server:
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
        hide_from_all_but(process_of_first_rank(server.pid), file)
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
