"""The scaffolding of multi-process tests must itself fail where it should."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_on_ranks

pytestmark = pytest.mark.ranks


@on_ranks(2)
def test_the_body_runs_on_every_rank_of_one_process_group(tmp_path):
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    assert total.item() == 3
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2


def rank_and(extra: str) -> tuple[int, str]:
    return dist.get_rank(), extra


def fail_on_rank_1() -> None:
    assert dist.get_rank() != 1, "as it must"


def die_on_rank_1() -> int:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_what_each_rank_returned_comes_back():
    assert run_on_ranks(rank_and, "x", world_size=3) == [(0, "x"), (1, "x"), (2, "x")]


def has_group() -> bool:
    return dist.is_initialized()


def test_a_single_rank_is_the_undistributed_case():
    assert run_on_ranks(has_group, world_size=1) == [False]
    assert run_on_ranks(has_group, world_size=2) == [True, True]


def test_a_rank_that_fails_fails_the_run_with_its_traceback():
    with pytest.raises(AssertionError, match=r"rank 1: Traceback[^$]*as it must"):
        run_on_ranks(fail_on_rank_1, world_size=2)


def test_a_rank_that_dies_fails_the_run_unless_it_may():
    with pytest.raises(AssertionError, match="rank 1: died"):
        run_on_ranks(die_on_rank_1, world_size=2)
    assert run_on_ranks(die_on_rank_1, world_size=2, may_die=[1]) == [7, None]


def test_a_rank_that_hangs_fails_the_run_at_the_deadline():
    with pytest.raises(AssertionError, match="rank 1: gave no result within 2 s"):
        run_on_ranks(hang_on_rank_1, world_size=2, deadline_s=2)
