"""Ranks that meet: all go on, or all raise the same error, also when one died, hangs or was late."""

from __future__ import annotations

import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from weightferry.exporter.collectives import ControlGroup, gather_all
from weightferry.shared.errors import BaseMismatchError, PublishError

pytestmark = pytest.mark.ranks


def what_is_raised(control: ControlGroup, error: Exception | None = None) -> str:
    with pytest.raises((PublishError, BaseMismatchError)) as caught:
        control.agree(error)
    return f"{type(caught.value).__name__}: {caught.value}"


def fail_on_rank_1_and_2() -> list[str]:
    control = ControlGroup(30)
    control.agree(None)
    said = [
        what_is_raised(control, OSError("disk") if dist.get_rank() == 1 else None),
        what_is_raised(control, {1: ValueError("one"), 2: ValueError("two")}.get(dist.get_rank())),
        what_is_raised(control, BaseMismatchError("two bases") if dist.get_rank() == 2 else None),
    ]
    control.agree(None)
    return said


def test_every_rank_raises_the_same_error_and_the_group_goes_on():
    first, *others = run_on_ranks(fail_on_rank_1_and_2, world_size=3)
    assert all(said == first for said in others)
    assert first[0].startswith("PublishError: the version was not published: rank 1 failed: OSError: disk")
    assert "rank 1 failed: ValueError: one" in first[1]
    assert first[2] == "BaseMismatchError: two bases"


def tell() -> list[object]:
    control = ControlGroup(30)
    values: list[object] = [control.from_first(lambda n=n: {"n": [n, dist.get_rank()]}) for n in range(3)]
    with pytest.raises(PublishError) as caught:
        control.from_first(lambda: 1 / 0)
    return [*values, str(caught.value), control.from_first(lambda: "after")]


def test_what_the_first_rank_knows_or_suffers_reaches_all():
    first, second = run_on_ranks(tell, world_size=2)
    assert first == second
    assert first[:3] == [{"n": [n, 0]} for n in range(3)]
    assert "rank 0 failed: ZeroDivisionError" in first[3]
    assert first[4] == "after"


def die_on_rank_1() -> tuple[float, str, str]:
    control = ControlGroup(600)
    control.agree(None)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with mock.patch("weightferry.exporter.collectives.SETTLE_S", 3.0):
        said = what_is_raised(control)
    return time.monotonic() - start, said, what_is_raised(control)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_died_is_named_by_all_others_long_before_the_deadline(world_size):
    others = [told for told in run_on_ranks(die_on_rank_1, world_size=world_size, may_die=[1]) if told]
    assert len(others) == world_size - 1
    for seconds, said, again in others:
        assert seconds < 10
        assert "rank 1 failed: it died, or hangs" in said
        assert "rank 1 failed" in again
        assert "restart the job" in again


def be_late_on_rank_1() -> str:
    control = ControlGroup(2)
    control.agree(None)
    time.sleep(4 if dist.get_rank() == 1 else 0)
    return what_is_raised(control)


def test_a_rank_that_comes_after_the_deadline_is_named_by_all():
    said = run_on_ranks(be_late_on_rank_1, world_size=3)
    assert len(set(said)) == 1
    assert "rank 1 failed: it was later than the others by more than 2 s" in said[0]


def die_on_rank_0_before_it_tells() -> str:
    control = ControlGroup(600)
    control.agree(None)  # all are connected

    def act() -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    with mock.patch("weightferry.exporter.collectives.SETTLE_S", 1.0), pytest.raises(PublishError) as caught:
        control.from_first(act)
    return str(caught.value)


def test_a_first_rank_that_died_before_it_told_is_named():
    (_, said) = run_on_ranks(die_on_rank_0_before_it_tells, world_size=2, may_die=[0])
    assert "rank 0 failed: it died, or hangs" in said


def lose_the_other_while_telling() -> str | None:
    control = ControlGroup(600)
    control.agree(None)  # all are connected
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return control.from_first(lambda: "committed")


def test_what_the_first_rank_has_done_it_has_done_though_the_others_are_lost():
    assert run_on_ranks(lose_the_other_while_telling, world_size=2, may_die=[1]) == ["committed", None]


@on_ranks(2)
def test_gathering_goes_on_after_an_error_so_that_no_other_rank_waits_for_ever():
    mesh = init_device_mesh("cpu", (2,))
    whole = [torch.full((4, 3), float(n), dtype=torch.bfloat16) for n in range(5)]
    sharded = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in whole]
    real, calls = DTensor.full_tensor, []

    def out_of_memory(tensor: DTensor) -> torch.Tensor:
        calls.append(tensor)
        gathered = real(tensor)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise MemoryError("no room")
        return gathered

    with mock.patch.object(DTensor, "full_tensor", out_of_memory):
        if dist.get_rank() == 1:
            with pytest.raises(MemoryError):
                gather_all(sharded, keep=True)
        else:
            gathered = gather_all(sharded, keep=True)
            for tensor, part in zip(whole, sharded, strict=True):
                assert torch.equal(gathered[id(part)], tensor)
    assert len(calls) == 5


def test_one_process_needs_no_group():
    control = ControlGroup(30)
    control.agree(None)
    assert control.from_first(lambda: 3) == 3
    assert "rank 0 failed: OSError: disk" in what_is_raised(control, OSError("disk"))
