"""merged_lora when something goes wrong inside or around it: the model comes back, and every rank is told."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from exporter_ranks import build
from merged_ranks import CASE, IDS, Lost, Snapshot, logits, lose, make, rank, use
from ranks import on_ranks, run_on_ranks
from tiny_model import make_tiny_model
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import register_fsdp_forward_method

from weightferry.exporter import in_place, merged_context
from weightferry.exporter.merged_context import merged_lora
from weightferry.exporter.model_walk import base_model
from weightferry.shared.errors import MergeError

pytestmark = pytest.mark.ranks

RESTORES = ("bytes", "unmerge")
SHARDED = ("FSDP1", "FSDP1 leaves", "FSDP1 SHARD_GRAD_OP", "FSDP2")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merged-safety")
    make_tiny_model(path / "tiny")
    return path


@pytest.mark.parametrize("restore", RESTORES)
@pytest.mark.parametrize("sharding", SHARDED)
@on_ranks(2)
def test_an_exception_inside_passes_and_leaves_the_model_as_it_was(directory, sharding, restore):
    root = make(directory, sharding)
    before = Snapshot(root)
    for body in (lose, lambda: (logits(root), lose())):
        with pytest.raises(Lost):
            use(root, restore, body)
        before.require_same(root, restore)


@pytest.mark.parametrize("restore", RESTORES)
@pytest.mark.parametrize("sharding", SHARDED)
@on_ranks(2)
def test_an_exception_in_the_middle_of_a_forward_too(directory, sharding, restore):
    """FSDP then still holds the merged weights of the units that it believes in use."""
    root = make(directory, sharding)
    before = Snapshot(root)
    for number in (0, 1):
        hook = base_model(root).model.layers[number].register_forward_pre_hook(lose)
        with pytest.raises(Lost):
            use(root, restore, lambda: root(input_ids=IDS))  # with gradients, as an interrupted training step
        hook.remove()
        before.require_same(root, restore)


@pytest.mark.parametrize("sharding", ["none", "FSDP1", "FSDP2"])
def test_generating_inside_is_generating_with_the_adapters(directory, sharding):
    run_on_ranks(generate_inside, directory, sharding, world_size=1 if sharding == "none" else 2)


def generate_inside(directory: Path, sharding: str) -> None:
    root = make(directory, sharding)
    inside: Callable[[], Any] = contextlib.nullcontext
    if sharding == "FSDP2":
        register_fsdp_forward_method(root, "generate")
    if sharding == "FSDP1":  # whose root's parameters are whole only in its own forward
        inside = functools.partial(FSDP1.summon_full_params, root, recurse=False, writeback=False)
    plain = build(CASE, directory, dtype=torch.float32).eval()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    wanted = plain.generate(input_ids=IDS, **options)
    before = Snapshot(root)
    for _ in range(2):
        with merged_lora(root), inside():
            assert torch.equal(root.generate(input_ids=IDS, **options), wanted)
        before.require_same(root, "bytes")


@on_ranks(2)
def test_training_goes_on_exactly_as_if_nothing_had_been_merged(directory):
    losses = []
    for merges in (False, True):
        root = make(directory, "FSDP2").train()
        optimizer = torch.optim.AdamW([p for p in root.parameters() if p.requires_grad], lr=0.01)
        for _ in range(3):
            loss = root(input_ids=IDS + rank()).logits.square().mean()
            loss.backward()
            if merges:
                with merged_lora(root):
                    root.eval()
                    logits(root)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("restore", RESTORES)
def test_flags_come_back_though_they_were_changed_inside(directory, restore):
    root = make(directory, "none")
    next(p for n, p in root.named_parameters() if "lora_A" in n).requires_grad_(False)  # frozen on purpose
    root.model.train()
    before = Snapshot(root)
    with merged_lora(root, restore=restore):
        root.eval().requires_grad_(False)
    before.require_same(root, restore)


def failing_at(call: int) -> Callable:
    calls, real = [], in_place.merged_state

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            raise MemoryError("no room")
        return real(*arguments, **options)

    return wrapped


@pytest.mark.parametrize("restore", RESTORES)
@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP2"])
def test_a_rank_that_cannot_merge_is_named_by_all_and_nothing_stays_merged(directory, sharding, restore):
    for said in run_on_ranks(fail_to_merge, directory, sharding, restore, world_size=2):
        assert said == ("merged_lora: rank 1 failed: MemoryError: no room. The model is as it was before")


def fail_to_merge(directory: Path, sharding: str, restore: str) -> str:
    root = make(directory, sharding)
    before = Snapshot(root)
    patch = mock.patch.object(in_place, "merged_state", failing_at(4))  # the second of the second layer
    with (
        patch if rank() == 1 else mock.MagicMock(),
        pytest.raises(MergeError) as caught,
        merged_lora(root, restore=restore),
    ):
        raise AssertionError("it went on")
    before.require_same(root, restore)
    with merged_lora(root, restore=restore):
        logits(root)
    before.require_same(root, restore)
    return str(caught.value)


@pytest.mark.parametrize("restore", RESTORES)
def test_a_rank_that_fails_inside_is_named_by_the_others(directory, restore):
    first, second = run_on_ranks(fail_inside, directory, restore, world_size=2)
    assert first == "MergeError: merged_lora: rank 1 failed: Lost: here. The model is as it was before"
    assert second == "Lost: here"


def fail_inside(directory: Path, restore: str) -> str:
    root = make(directory, "FSDP2")
    before = Snapshot(root)
    with pytest.raises((MergeError, Lost)) as caught:
        use(root, restore, lambda: (logits(root), lose() if rank() == 1 else None))
    before.require_same(root, restore)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("restore", RESTORES)
def test_an_interrupt_while_merging_leaves_no_adapter_acting_twice_or_never(directory, restore):
    root = make(directory, "none")
    before = Snapshot(root)
    real, calls = in_place.Change.write, []

    def interrupt(change: Any) -> None:
        real(change)
        calls.append(None)
        if len(calls) == 4:  # the second of the second layer
            raise KeyboardInterrupt

    with (
        mock.patch.object(in_place.Change, "write", interrupt),
        pytest.raises(KeyboardInterrupt),
        merged_lora(root, restore=restore),
    ):
        raise AssertionError("it went on")
    assert torch.allclose(logits(root), before._answers, atol=1e-4)
    if restore == "bytes":
        before.require_same(root, restore)


def test_weights_that_could_not_be_put_back_are_told(directory):
    root = make(directory, "none")
    broken = mock.patch.object(merged_context.InPlaceMerge, "_put_back", side_effect=RuntimeError("device"))
    with broken, pytest.raises(MergeError, match=r"rank 0 failed: device\. Its weights may still be merged"):
        use(root, "bytes", lambda: None)


def test_weights_that_could_not_be_taken_out_are_told_on_every_rank(directory):
    for said in run_on_ranks(fail_to_unmerge, directory, world_size=2):
        words = "MemoryError: no room. Its weights may still be merged: load them again"
        assert said == f"merged_lora: rank 1 failed: {words}"


def fail_to_unmerge(directory: Path) -> str:
    root = make(directory, "FSDP2")
    broken = mock.patch.object(merged_context, "unmerge_unit", side_effect=MemoryError("no room"))
    with pytest.raises(MergeError) as caught, broken if rank() == 1 else mock.MagicMock():
        use(root, "unmerge", lambda: None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("restore", "outcome"),
    [("bytes", "is as it was before"), ("unmerge", "may still be merged: load them again")],
)
def test_a_rank_that_dies_inside_is_named_and_not_waited_for(directory, restore, outcome):
    (said, seconds), _ = run_on_ranks(die_inside, directory, restore, world_size=2, may_die=[1])
    assert said.startswith("merged_lora: rank 1 failed: it died, or hangs: it said nothing")
    assert said.endswith(outcome)
    assert seconds < 20


def die_inside(directory: Path, restore: str) -> tuple[str, float]:
    root = make(directory, "FSDP2")
    gathers = mock.Mock(side_effect=merged_context.gather_all)

    def die() -> None:
        gathers.reset_mock()
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    with (
        mock.patch("weightferry.exporter.collectives.SETTLE_S", 3.0),
        mock.patch.object(merged_context, "gather_all", gathers),
        pytest.raises(MergeError) as caught,
    ):
        use(root, restore, die)
    assert gathers.call_count == 0  # over NCCL it would wait for the dead
    assert any(getattr(module, "merged", False) for module in root.modules()) == (restore == "unmerge")
    return str(caught.value), time.monotonic() - start


def test_nothing_of_a_use_stays_in_memory(directory):
    root = make(directory, "none")
    with merged_lora(root):
        pass
    gc.collect()
    kinds = (merged_context.InPlaceMerge, in_place.Mark, in_place.Change)
    assert not [o for o in gc.get_objects() if type(o) in kinds]
