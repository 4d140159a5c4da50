"""The demo ends what it starts, and shows why a job failed."""

from __future__ import annotations

import os
import sys
import time

import pytest

from weightferry.examples import demo_jobs
from weightferry.examples.demo_jobs import Job
from weightferry.shared.errors import UsageError, WeightferryError

STUBBORN_WITH_A_CHILD_IN_ITS_OWN_SESSION = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(child.pid, flush=True)
time.sleep(600)
"""


def start(tmp_path, code: str) -> Job:
    return Job(
        "trainer", [sys.executable, "-c", code], log=tmp_path / "job.log", environment={"NOTE": "seen"}
    )


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_job_that_dies_is_named_with_the_end_of_its_log(tmp_path):
    with start(tmp_path, "import os; print(os.environ['NOTE']); raise SystemExit(3)") as job:
        with pytest.raises(
            WeightferryError, match=r"(?s)the trainer ended with exit code 3 before .*\| seen.*job.log"
        ):
            job.wait_until(lambda: False, what="it was ready", deadline_s=30)
        with pytest.raises(WeightferryError, match="exit code 3"):
            job.require_running_or_done()


def test_the_reason_that_a_job_gave_is_shown_without_what_came_after(tmp_path):
    with start(tmp_path, "print('weightferry: no such base', flush=True); raise ValueError('noise')") as job:
        with pytest.raises(WeightferryError) as raised:
            job.wait_until(lambda: False, what="it was ready", deadline_s=30)
        assert "| weightferry: no such base" in str(raised.value)
        assert "noise" not in str(raised.value)


def test_what_the_user_must_change_stays_bad_usage(tmp_path):
    with (
        start(tmp_path, "print('weightferry: the port is taken'); raise SystemExit(2)") as job,
        pytest.raises(UsageError, match="the port is taken"),
    ):
        job.wait_until(lambda: False, what="it was ready", deadline_s=30)


def test_waiting_for_a_job_has_a_deadline(tmp_path):
    with (
        start(tmp_path, "import time; time.sleep(600)") as job,
        pytest.raises(WeightferryError, match="did not happen within"),
    ):
        job.wait_until(lambda: False, what="readiness", deadline_s=0.3)


def test_a_job_that_ignores_the_request_is_killed_with_its_descendants(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_jobs, "STOP_DEADLINE_S", 0.5)
    with start(tmp_path, STUBBORN_WITH_A_CHILD_IN_ITS_OWN_SESSION) as job:
        job.wait_until(lambda: job.log.read_text().endswith("\n"), what="a child", deadline_s=30)
        child = int(job.log.read_text())
        assert is_alive(child)
    assert job.exit_code() == -9
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        os.sched_yield()
    assert not is_alive(child)
