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
from exporter_ranks import CASES, Case, build, open_exchange, place
from merged_ranks import IDS, SHARDINGS, differing, logits, rank, whole_state
from ranks import on_ranks, run_on_ranks
from tiny_model import make_tiny_model
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import register_fsdp_forward_method

from weightferry.exporter import in_place, merged_context
from weightferry.exporter.merged_context import merged_lora
from weightferry.exporter.model_walk import base_model
from weightferry.exporter.publisher import Publisher
from weightferry.shared.errors import ConfigError, MergeError, UnsupportedError

pytestmark = pytest.mark.ranks

# Adapted weights in the layers' units and in the root's, which FSDP leaves unsharded after an evaluation.
CASE = Case(base="tiny", lora={"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]})
RESTORES = ("bytes", "unmerge")
SHARDED = ("FSDP1", "FSDP1 leaves", "FSDP1 SHARD_GRAD_OP", "FSDP2")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merged-safety")
    make_tiny_model(path / "tiny")
    make_tiny_model(path / "tied", tied=True)
    return path


def make(directory: Path, sharding: str, case: Case = CASE) -> Any:
    """In float32, which every kind of unit takes."""
    return SHARDINGS[sharding](build(case, directory, dtype=torch.float32)).eval()


def flags(root: Any) -> list[tuple]:
    """Training modes, gradient flags and merged adapters of everything."""
    modules = [
        (name, m.training, tuple(getattr(m, "merged_adapters", ()))) for name, m in root.named_modules()
    ]
    return [*modules, *((name, p.requires_grad) for name, p in root.named_parameters())]


class Snapshot:
    """What a model is and answers, to be compared after something happened to it."""

    def __init__(self, root: Any) -> None:
        self._answers, self._state, self._flags = logits(root), whole_state(root), flags(root)

    def require_same(self, root: Any, restore: str) -> None:
        answers, state = logits(root), whole_state(root)
        if restore == "bytes":
            assert torch.equal(answers, self._answers)
            assert differing(state, self._state) == []
        else:  # float32: what is left of the rounding of one sum and one difference
            assert torch.allclose(answers, self._answers, atol=1e-4)
            assert all(torch.allclose(state[n], self._state[n], atol=1e-6) for n in state)
        assert flags(root) == self._flags
        assert not [n for m in root.modules() for n in ("merge", "set_adapter") if n in m.__dict__]


class Lost(Exception):
    """What the tests raise inside."""


def lose(*_: Any) -> None:
    raise Lost("here")


def use(root: Any, restore: str, body: Callable[[], Any]) -> None:
    with merged_lora(root, restore=restore):
        body()


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


def refused_inside(root: Any, directory: Path) -> dict[str, Callable[[], Any]]:
    exchange = open_exchange(place()[0], directory / "refused-inside", directory / "tiny")

    def nest() -> None:
        with merged_lora(root):
            raise AssertionError("it was allowed")

    def disable() -> None:
        with root.disable_adapter():
            raise AssertionError("it was allowed")

    return {
        "nesting": nest,
        "disabling": disable,
        "merging": root.merge_adapter,
        "unmerging": root.unmerge_adapter,
        "choosing": lambda: root.set_adapter("default"),
        "merging for good": root.merge_and_unload,
        "publishing": lambda: Publisher(root, exchange),
    }


@pytest.mark.parametrize(
    "name",
    ["nesting", "disabling", "merging", "unmerging", "choosing", "merging for good", "publishing"],
)
@pytest.mark.filterwarnings("ignore:Adapter cannot be set when the model is merged")
def test_what_would_confuse_is_refused_inside_and_harms_nothing(directory, name):
    root = make(directory, "none")
    before = Snapshot(root)
    with merged_lora(root):
        inside = logits(root)
        with pytest.raises(UnsupportedError, match=r"inside merged_lora|has ended"):
            refused_inside(root, directory)[name]()
        assert torch.equal(logits(root), inside)
    before.require_same(root, "bytes")
    with root.disable_adapter():
        assert not torch.equal(logits(root), inside)


@on_ranks(2)
def test_a_publisher_made_before_refuses_inside_and_works_afterwards(directory, tmp_path):
    root = make(directory, "FSDP2")
    with Publisher(root, open_exchange(rank(), tmp_path / "exchange", directory / "tiny")) as publisher:
        first = publisher.publish(1).wait()
        with merged_lora(root):
            logits(root)
            with pytest.raises(UnsupportedError, match=r"merged in place; .* has ended"):
                publisher.publish(2)
        second = publisher.publish(3).wait()
    for file in first.path.rglob("*.safetensors"):
        assert file.read_bytes() == (second.path / file.relative_to(first.path)).read_bytes()


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


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tied head": (
        lambda d: build(Case(base="tied", lora={"target_modules": ["embed_tokens"]}), d),
        r"embed_tokens\.weight is one tensor with lm_head\.weight, .* tie_word_embeddings=False",
    ),
    "two adapters of one tied tensor": (
        lambda d: build(Case(base="tied", lora={"target_modules": ["embed_tokens", "lm_head"]}), d),
        r"lm_head\.weight is one tensor with model\.embed_tokens\.weight, but their adapters differ",
    ),
    "disabled adapters": (
        lambda d: disabled(build(CASE, d)),
        r"embed_tokens are disabled, .*enable_adapter_layers\(\)\) before you merge",
    ),
    "merged adapters": (
        lambda d: merged(build(CASE, d)),
        r"embed_tokens are merged in place; .*unmerge_adapter",
    ),
    "an aLoRA": (
        lambda d: build(
            Case(base="tiny", lora={"target_modules": ["q_proj"], "alora_invocation_tokens": [3]}), d
        ),
        "aLoRA, which cannot be merged",
    ),
}


def disabled(model: Any) -> Any:
    model.base_model.disable_adapter_layers()
    return model


def merged(model: Any) -> Any:
    model.merge_adapter()
    return model


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True` and a tied layer is part of the adapter"
)
def test_what_cannot_be_merged_in_place_is_refused_untouched(directory, name):
    model, words = REFUSED[name][0](directory), REFUSED[name][1]
    before, flags_before = whole_state(model), flags(model)
    with pytest.raises(UnsupportedError, match=words), merged_lora(model):
        raise AssertionError("it was accepted")
    assert differing(whole_state(model), before) == []
    assert flags(model) == flags_before


def test_what_cannot_be_taken_out_again_is_refused_by_unmerge_alone(directory):
    """A magnitude of zero: the merged row is zero, whatever the base's was."""
    model = build(CASES["dora"], directory)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "magnitude" in n)[5] = 0
    before = whole_state(model)
    with (
        pytest.raises(UnsupportedError, match=r'does not give \S+ back; use .*restore="bytes"'),
        merged_lora(model, restore="unmerge"),
    ):
        raise AssertionError("it was accepted")
    assert differing(whole_state(model), before) == []
    with merged_lora(model):
        pass
    assert differing(whole_state(model), before) == []


def test_a_way_to_restore_that_does_not_exist_is_told(directory):
    with pytest.raises(ConfigError, match="restore='copy'; expected one of bytes, unmerge"):
        merged_lora(build(CASE, directory), restore="copy").__enter__()
