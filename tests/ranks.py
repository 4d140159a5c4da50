"""Makes a test a real run of several processes that form one gloo process group, with a deadline.

    @on_ranks(2)
    def test_every_rank_sees_the_sum(tmp_path):
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total)
        assert total.item() == 1

The body runs once on each rank, with the fixtures as arguments (they travel pickled). `run_on_ranks` does the
same for a function at the top of any file and returns what each rank returned. Processes fork from a server
that has imported torch, transformers and PEFT already, so that a run costs a fraction of a second. A single
rank gets no process group: it is the undistributed case.
"""

from __future__ import annotations

import datetime
import functools
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0
OTHERS_MAY_TAKE_S = 45.0
COLLECTIVE_DEADLINE_S = 60.0
PRELOADED = [
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "peft",
    "weightferry.exporter.publisher",
    "weightferry.trainer.settings_words",
    "weightferry.trainer.loop",
    *("exporter_ranks", "hypothesis", "matrix", "merged_ranks"),  # what else the tests' own files import
]


def on_ranks(world_size: int, *, deadline_s: float = DEADLINE_S) -> Callable[[Callable], Callable]:
    """Decorate a test: its body runs on `world_size` ranks, and fails if it fails on any of them."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            run_on_ranks(test, world_size=world_size, deadline_s=deadline_s, **fixtures)

        return run

    return decorate


def forkserver() -> ForkServerContext:
    """Where processes come from that have imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_on_ranks(
    work: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    deadline_s: float = DEADLINE_S,
    may_die: Collection[int] = (),
    **options: Any,
) -> list[Any]:
    """What `work(*arguments, **options)` returned on each rank; None for a rank that died as it may.

    `work` is a function at the top of a file. AssertionError with every failing rank's traceback.
    """
    context = forkserver()
    place = (inspect.getfile(inspect.unwrap(work)), work.__qualname__)
    with tempfile.TemporaryDirectory() as meeting:
        processes: dict[Connection, BaseProcess] = {}
        for rank in range(world_size):
            inlet, outlet = context.Pipe(duplex=False)
            job = (outlet, place, f"file://{meeting}/store", rank, world_size, arguments, options)
            process = context.Process(target=_run, args=job, name=f"rank {rank}", daemon=True)
            process.start()
            outlet.close()
            processes[inlet] = process
        try:
            reports = _collect(processes, deadline_s)
        finally:
            _end(list(processes.values()))
    failures = [
        f"rank {rank}: {report[1]}"
        for rank, report in enumerate(reports)
        if not report[0] and not (report[1] == _DIED and rank in may_die)
    ]
    assert not failures, "\n".join(failures)
    return [value if succeeded else None for succeeded, value in reports]


_DIED = "died or was ended without a word"


def _collect(processes: dict[Connection, BaseProcess], deadline_s: float) -> list[tuple[bool, Any]]:
    """Every rank's (succeeded, value); once one has failed the others have little time left."""
    reports: dict[Connection, tuple[bool, Any]] = {}
    deadline = time.monotonic() + deadline_s
    while len(reports) < len(processes) and (left_s := deadline - time.monotonic()) > 0:
        for inlet in wait([inlet for inlet in processes if inlet not in reports], timeout=left_s):
            assert isinstance(inlet, Connection)
            try:
                reports[inlet] = pickle.loads(inlet.recv_bytes())
            except EOFError:
                reports[inlet] = (False, _DIED)
            if not reports[inlet][0]:
                deadline = min(deadline, time.monotonic() + OTHERS_MAY_TAKE_S)
    return [reports.get(inlet, (False, f"gave no result within {deadline_s:.0f} s")) for inlet in processes]


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(timeout=1.0)
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()


def _run(
    outlet: Connection,
    place: tuple[str, str],
    meeting: str,
    rank: int,
    world_size: int,
    arguments: tuple,
    options: dict[str, Any],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        if world_size > 1:
            deadline = datetime.timedelta(seconds=COLLECTIVE_DEADLINE_S)
            dist.init_process_group(
                "gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=deadline
            )
            dist.barrier()  # else a rank that has nothing to do ends while others still connect to it
        report = (True, _load(*place)(*arguments, **options))
    except BaseException:
        report = (False, traceback.format_exc())
    outlet.send_bytes(pickle.dumps(report))  # by value: `send` would lend tensors that end with this process
    outlet.close()
    sys.stdout.flush()
    os._exit(0)  # communicators of a peer that died would wait for it on a regular way out


def _load(file: str, name: str) -> Callable:
    """The function below all decorators, from its file: pytest's module names are not importable here."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return inspect.unwrap(getattr(module, name))
