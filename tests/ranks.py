"""Runs a function on real ranks: fresh processes with a gloo group of their own, under a deadline.

The function lives in a module of `tests/` (not in a test file), so that the spawned processes can import it;
it is called as `function(rank, world_size, *arguments)`. A rank's exception ends the run and is shown.
"""

from __future__ import annotations

import datetime
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

COLLECTIVE_DEADLINE_S = 60
DEADLINE_S = 240.0


def run_ranks(
    world_size: int, function: Callable, *arguments: Any, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """What the function returned on each rank; AssertionError with the first failing rank's traceback."""
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_rank, args=(rank, world_size, directory, function, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(deadline_s)
        finally:
            hung = [process for process in processes if process.is_alive()]
            for process in hung:
                process.kill()
        assert not hung, f"{len(hung)} of {world_size} ranks did not end within {deadline_s} s"
        return [_result(Path(directory), rank) for rank in range(world_size)]


def _rank(rank: int, world_size: int, directory: str, function: Callable, arguments: tuple) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=COLLECTIVE_DEADLINE_S),
        )
    try:
        outcome = (True, function(rank, world_size, *arguments))
    except BaseException:
        outcome = (False, traceback.format_exc())
    (Path(directory) / f"{rank}.pickle").write_bytes(pickle.dumps(outcome))
    if not outcome[0]:
        os._exit(1)  # peers that wait for this rank must see it go
    if world_size > 1:
        dist.destroy_process_group()


def _result(directory: Path, rank: int) -> Any:
    file = directory / f"{rank}.pickle"
    assert file.exists(), f"rank {rank} left no result: it was killed"
    worked, value = pickle.loads(file.read_bytes())
    assert worked, f"rank {rank} failed:\n{value}"
    return value
