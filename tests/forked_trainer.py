"""The trainer's command without a new interpreter: its ranks fork from a server that has imported everything.

What runs is `weightferry.trainer` as `__main__`, with the arguments and the environment that torchrun gives a
rank, its own exit code and its own standard streams. It costs a second, where torchrun and two ranks cost ten
seconds of imports. Tests about torchrun itself, about signals and about imports start the real one
(`TrainerJob.launch` and `TrainerJob.started`).
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from ranks import forkserver

from weightferry.examples.demo_jobs import free_port

STREAMS = ("stdout", "stderr")
LOOK_S = 0.02


def run_forked_trainer(
    arguments: Sequence[str], *, num_ranks: int | None, kill_at: str, deadline_s: float
) -> subprocess.CompletedProcess[str]:
    """Every rank's streams, one after the other, and the exit code of the first rank that failed.

    As under torchrun, the other ranks are ended then. None is one process without torchrun's environment.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ranks = [
            forkserver().Process(
                target=_become_trainer, args=(list(arguments), environment, str(directory), n)
            )
            for n, environment in enumerate(_environments(num_ranks, kill_at))
        ]
        for rank in ranks:
            rank.start()
        exit_code = _wait(ranks, deadline_s)
        told = {
            stream: "".join((directory / f"{n}.{stream}").read_text() for n in range(len(ranks)))
            for stream in STREAMS
        }
    return subprocess.CompletedProcess(list(arguments), exit_code, told["stdout"], told["stderr"])


def _environments(num_ranks: int | None, kill_at: str) -> list[dict[str, str]]:
    own = dict(os.environ) | {"WEIGHTFERRY_TEST_KILL_AT": kill_at}
    if num_ranks is None:
        return [own]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    return [own | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def _wait(ranks: Sequence[BaseProcess], deadline_s: float) -> int:
    deadline = time.monotonic() + deadline_s
    failed = 0
    try:
        while not failed and any(rank.exitcode is None for rank in ranks):
            assert time.monotonic() < deadline, f"the trainer did not end within {deadline_s:.0f} s"
            time.sleep(LOOK_S)
            failed = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()
    return failed or next((rank.exitcode for rank in ranks if rank.exitcode), 0)


def _become_trainer(arguments: list[str], environment: dict[str, str], directory: str, rank: int) -> None:
    for number, stream in enumerate(STREAMS, start=1):
        os.dup2(os.open(f"{directory}/{rank}.{stream}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["weightferry.trainer", *arguments]
    runpy.run_module("weightferry.trainer", run_name="__main__", alter_sys=True)
