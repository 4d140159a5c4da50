"""A short run of `make chaos`, so that the harness itself does not rot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).with_name("chaos.py")


def run_chaos(*arguments: str) -> str:
    command = [sys.executable, str(CHAOS), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_some_rounds_of_every_fault_break_no_promise():
    out = run_chaos("--rounds", "95")
    assert "    0 torn versions read" in out
    assert "    0 hangs" in out


def test_a_seed_repeats_its_run():
    arguments = ("--rounds", "40", "--seed", "7", "--only", "damage")
    assert run_chaos(*arguments) == run_chaos(*arguments)


@pytest.mark.slow
def test_two_thousand_rounds_break_no_promise():
    assert "2000 rounds" in run_chaos("--rounds", "2000", "--seed", "3")
