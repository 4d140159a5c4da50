"""`weightferry demo` for real: a vLLM server, two torchrun ranks, and an accuracy that rises."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightferry.examples.demo_client import KEEP_IDLE_S
from weightferry.shared.exchange import Exchange
from weightferry.shared.verify import verify_exchange

DEMO = [sys.executable, "-m", "weightferry.shared.command", "demo"]
LINE = re.compile(r"^version (\w+)  step (\d+).*  accuracy ([\d.]+)%$", re.MULTILINE)

pytestmark = [pytest.mark.vllm, pytest.mark.ranks]


@pytest.fixture(scope="module")
def demo_dir(tmp_path_factory):
    """Shared, so that the base is made once."""
    return tmp_path_factory.mktemp("demo")


def run_demo(demo_dir: Path, *flags: str) -> str:
    command = [*DEMO, "--dir", str(demo_dir), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def newest_run(demo_dir: Path) -> Path:
    return max(demo_dir.glob("run-*"))


def processes_naming(path: Path) -> list[str]:
    """Command lines of live processes that name a path."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended while we looked
        if str(path) in words and int(file.parent.name) != os.getpid():
            found.append(words)
    return found


def check_that_it_learned(output: str, run_directory: Path, *, last_step: int) -> None:
    measured = [(name, int(step), float(accuracy)) for name, step, accuracy in LINE.findall(output)]
    (first, _, before), (last, step, after) = measured[0], measured[-1]
    assert first == "base"
    assert after >= before + 15
    exchange = Exchange.open(run_directory / "exchange")
    newest = exchange.latest()
    assert newest is not None
    assert (str(newest.number), newest.step) == (last, step)
    assert step == last_step
    assert not verify_exchange(exchange)
    assert f"weightferry verify {exchange.path} {last}" in output
    assert not processes_naming(run_directory)


def test_the_demo_ends_with_a_version_that_answers_better_than_the_base(demo_dir):
    output = run_demo(demo_dir, "--steps", "60", "--publish-every", "20")
    check_that_it_learned(output, newest_run(demo_dir), last_step=60)


@pytest.mark.slow
def test_the_demo_serves_adapters_too(demo_dir):
    output = run_demo(demo_dir, "--steps", "60", "--publish-every", "20", "--apply", "adapter")
    check_that_it_learned(output, newest_run(demo_dir), last_step=60)


def test_an_idle_connection_is_given_up_before_vllm_closes_it():
    from vllm import envs

    assert envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE > KEEP_IDLE_S


def test_bad_usage_is_one_line_and_starts_nothing(demo_dir):
    command = [*DEMO, "--dir", str(demo_dir / "other"), "--steps", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "weightferry: --steps must be at least 1, 0 found\n"
    assert not (demo_dir / "other").exists()


def _heed_interrupts() -> None:
    """A shell starts its background jobs with SIGINT ignored, and so everything that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupting_the_demo_ends_both_jobs(demo_dir, tmp_path):
    command = [*DEMO, "--dir", str(demo_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("server:"):
                break
        run_directory = newest_run(demo_dir)
        assert processes_naming(run_directory)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(120) == 130
    deadline = time.monotonic() + 10
    while processes_naming(run_directory) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_naming(run_directory)
