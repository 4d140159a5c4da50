"""A publication that fails on some rank: nothing appears, all ranks say the same, the next one works."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from exporter_ranks import CASES, Case, base_hash, build, shard, train, without_shared_pages
from ranks import run_on_ranks
from tiny_model import make_tiny_model
from torch.distributed.tensor import DTensor

from weightferry.exporter import row_merge, unit_merge
from weightferry.exporter.model_walk import base_model
from weightferry.exporter.publisher import Publisher
from weightferry.shared import durable
from weightferry.shared.errors import BaseMismatchError, PublishError, UnsupportedError
from weightferry.shared.exchange import Exchange
from weightferry.shared.verify import verify_exchange
from weightferry.shared.version_files import VersionFiles

pytestmark = pytest.mark.ranks

CASE = CASES["all-linear"]
FOUR_LAYERS = Case(base="four layers", lora=CASE.lora)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("failures")
    make_tiny_model(path / "tiny")
    make_tiny_model(path / FOUR_LAYERS.base, num_layers=4)
    return path


def open_publisher(
    directory: Path, exchange_name: str, case: Case = CASE, **options: Any
) -> tuple[Publisher, Any]:
    """A publisher of the same trained model, sharded where there are ranks."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    model = shard(build(case, directory), dist.get_world_size() if dist.is_initialized() else 1)
    exchange = Exchange.open(directory / exchange_name, base=directory / case.base) if is_first else None
    return Publisher(model, exchange, **options), model


def failing_at(call: int, real: Callable, error: Exception, *, after: bool = False) -> Callable:
    """`real`, but its n-th call (from 1) raises, before or after it has done its work."""
    calls = []

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call and not after:
            raise error
        result = real(*arguments, **options)
        if len(calls) == call:
            raise error
        return result

    return wrapped


FULL = OSError(errno.ENOSPC, "No space left on device")


def on_a_full_disk(method: str) -> Any:
    return mock.patch(f"weightferry.shared.{method}", side_effect=FULL)


# What goes wrong, and on which rank. A layer has seven adapted modules: the third is in the middle of a unit.
DEALT_FAULTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "merging, in the middle of a unit": (
        0,
        lambda: mock.patch.object(
            unit_merge, "merged_state", failing_at(3, unit_merge.merged_state, RuntimeError("no merge"))
        ),
    ),
    "a full disk": (0, lambda: on_a_full_disk("version_files.VersionFiles.write_shard")),
    "a full disk, for another rank than the first": (
        1,
        lambda: on_a_full_disk("version_files.VersionFiles.write_shard"),
    ),
    "merging, on another rank than the first": (
        1,
        lambda: mock.patch.object(
            unit_merge, "merged_state", failing_at(3, unit_merge.merged_state, RuntimeError("no merge"))
        ),
    ),
}
FAULTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "merging rows, in the middle of a unit": (
        1,
        lambda: mock.patch.object(
            row_merge, "merge_clone", failing_at(3, row_merge.merge_clone, RuntimeError("no merge"))
        ),
    ),
    "gathering, on another rank than the first": (
        1,
        lambda: mock.patch.object(
            DTensor, "full_tensor", failing_at(5, DTensor.full_tensor, MemoryError("no room"), after=True)
        ),
    ),
    "a full disk when a joint shard is made": (1, lambda: on_a_full_disk("version_files.create_joint")),
    "a full disk when rows are written": (1, lambda: on_a_full_disk("durable.FilePart.write_at")),
    "a full disk that only fsync tells of": (1, lambda: on_a_full_disk("durable.os.fsync")),
    "reading a joint shard": (
        1,
        lambda: mock.patch(
            "weightferry.shared.version_files.read_part", side_effect=OSError(errno.EIO, "bad")
        ),
    ),
    "a full disk in the middle of the adapter": (
        0,
        lambda: mock.patch.object(
            VersionFiles, "_bytes_of_slot", failing_at(5, VersionFiles._bytes_of_slot, FULL)
        ),
    ),
    "a full disk when the adapter's file is made": (
        0,
        lambda: on_a_full_disk("version_files.VersionFiles.write_tensor_file"),
    ),
    "gathering in the middle of the adapter": (
        1,
        lambda: mock.patch.object(
            DTensor, "full_tensor", failing_at(31, DTensor.full_tensor, MemoryError("no room"), after=True)
        ),
    ),
    "selecting the adapter's tensors": (
        1,
        lambda: mock.patch("weightferry.exporter.publisher.AdapterView", side_effect=KeyError("lora_A")),
    ),
    "the log": (
        0,
        lambda: mock.patch(
            "weightferry.shared.commit_log.CommitLog.append", side_effect=OSError(errno.EIO, "broken")
        ),
    ),
}


def publish_under(directory: Path, fault: str) -> tuple[str, float, int]:
    """Publish, publish with the fault, publish again; returns what the fault's publication said."""
    is_dealt = fault in DEALT_FAULTS
    with without_shared_pages() if is_dealt else mock.MagicMock():
        publisher, model = open_publisher(directory, f"fault-{fault}")
    before = base_hash(model)
    with publisher:
        publisher.publish(1).wait()
        train(model, seed=2)
        rank, make = (DEALT_FAULTS if is_dealt else FAULTS)[fault]
        start = time.monotonic()
        with make() if dist.get_rank() == rank else mock.MagicMock(), pytest.raises(PublishError) as caught:
            publisher.publish(2)
        seconds = time.monotonic() - start
        assert base_hash(model) == before
        assert not any(module.merged for module in model.modules() if hasattr(module, "merged_adapters"))
        version = publisher.publish(3).wait()
    assert caught.value.rank == rank
    return str(caught.value), seconds, version.number


@pytest.mark.parametrize("fault", [*DEALT_FAULTS, *FAULTS])
def test_a_failure_on_one_rank_is_said_alike_on_all_and_the_next_publish_works(directory, fault):
    first, second = run_on_ranks(publish_under, directory, fault, world_size=2)
    assert first[0] == second[0]
    assert max(first[1], second[1]) < 10
    exchange = Exchange.open(directory / f"fault-{fault}")
    assert [version.step for version in exchange.versions()] == [1, 3]
    assert exchange.versions()[-1].number == first[2] == second[2]
    assert verify_exchange(exchange) == []
    assert len(list((exchange.path / "versions").iterdir())) == 2


def count_gathers_when_the_first_round_fails(directory: Path, failing_rank: int) -> int:
    with without_shared_pages():
        publisher, _ = open_publisher(directory, f"stops-early-{failing_rank}", FOUR_LAYERS, publish="merged")
    counted = mock.Mock(side_effect=lambda tensor: real(tensor))
    real = DTensor.full_tensor
    wrong = mock.patch.object(unit_merge, "merged_state", side_effect=RuntimeError("no merge"))
    with publisher, mock.patch.object(DTensor, "full_tensor", lambda tensor: counted(tensor)):
        with (
            wrong if dist.get_rank() == failing_rank else mock.MagicMock(),
            pytest.raises(PublishError, match=f"rank {failing_rank} failed: RuntimeError: no merge"),
        ):
            publisher.publish(1)
        until_failure, counted.call_count = counted.call_count, 0
        publisher.publish(2)
        assert counted.call_count == 2 * until_failure  # four layers carry adapters, the outer unit none
    return until_failure


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_after_a_failure_no_rank_goes_on_to_the_next_round(directory, failing_rank):
    first, second = run_on_ranks(
        count_gathers_when_the_first_round_fails, directory, failing_rank, world_size=2
    )
    # a round is a layer for each rank: seven modules with W, A and B, three of them with a bias
    assert first == second == 2 * (7 * 3 + 3)


def die_while_writing(directory: Path, is_dealt: bool) -> tuple[str, float]:
    with without_shared_pages() if is_dealt else mock.MagicMock():
        publisher, _ = open_publisher(directory, f"dies-writing-{is_dealt}", publish="merged")
    killed = killed_at_second_write if is_dealt else killed_at_first_rows
    start = time.monotonic()
    with (
        mock.patch("weightferry.exporter.collectives.SETTLE_S", 3.0),
        killed() if dist.get_rank() == 1 else mock.MagicMock(),
        pytest.raises(PublishError) as caught,
    ):
        publisher.publish(1)
    return str(caught.value), time.monotonic() - start


def killed_at_second_write() -> Any:
    """The process ends itself when it has written a file's header, and would write its first tensor."""

    def write(file: durable.NewFile, data: Any) -> None:
        if file.digest.size_bytes:
            os.kill(os.getpid(), signal.SIGKILL)
        real(file, data)

    real = durable.NewFile.write
    return mock.patch.object(durable.NewFile, "write", write)


def killed_at_first_rows() -> Any:
    def write_at(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return mock.patch.object(durable.FilePart, "write_at", write_at)


@pytest.mark.parametrize("is_dealt", [True, False])
def test_another_rank_killed_while_it_writes_is_named_within_seconds_and_nothing_is_left(directory, is_dealt):
    (said, seconds), _ = run_on_ranks(die_while_writing, directory, is_dealt, world_size=2, may_die=[1])
    assert "rank 1 failed: it died, or hangs" in said
    assert seconds < 10
    exchange = Exchange.open(directory / f"dies-writing-{is_dealt}")
    assert exchange.versions() == []
    assert list((exchange.path / "versions").iterdir()) == []


def die_in_the_middle(directory: Path) -> tuple[str, float]:
    publisher, _ = open_publisher(directory, "dies", publish="merged")
    real, calls, start = DTensor.full_tensor, [], time.monotonic()

    def gather(tensor: DTensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(tensor)

    with (
        mock.patch("weightferry.exporter.collectives.SETTLE_S", 3.0),
        mock.patch.object(DTensor, "full_tensor", gather if dist.get_rank() == 1 else real),
        pytest.raises(PublishError) as caught,
    ):
        publisher.publish(1)
    return str(caught.value), time.monotonic() - start


def test_a_rank_killed_while_gathering_is_named_within_seconds_and_nothing_appears(directory):
    (said, seconds), _ = run_on_ranks(die_in_the_middle, directory, world_size=2, may_die=[1])
    assert "rank 1 failed: it died, or hangs" in said
    assert seconds < 10
    exchange = Exchange.open(directory / "dies")
    assert exchange.versions() == []
    assert list((exchange.path / "versions").iterdir()) == []


@pytest.fixture
def publisher(directory: Path, tmp_path: Path):
    """In this process, unsharded."""
    made, _ = open_publisher(directory, str(tmp_path / "exchange"))
    with made:
        yield made


def test_what_was_committed_stays_though_the_pointer_could_not_be_moved(publisher, tmp_path, caplog):
    with mock.patch(
        "weightferry.shared.publication.point_at_newest", side_effect=OSError(errno.ENOSPC, "full")
    ):
        version = publisher.publish(1).wait()
    exchange = Exchange.open(tmp_path / "exchange")
    assert [found.number for found in exchange.versions()] == [version.number]
    assert version.path.is_dir()
    assert f"version {version.number} is committed, but afterwards" in caplog.text
    publisher.publish(2)
    assert verify_exchange(exchange) == []


def test_what_was_committed_stays_though_the_process_was_interrupted_right_after(publisher, tmp_path):
    interrupted = mock.patch("weightferry.shared.publication.point_at_newest", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        publisher.publish(1)
    exchange = Exchange.open(tmp_path / "exchange")
    assert [version.step for version in exchange.versions()] == [1]
    publisher.publish(2)
    assert verify_exchange(exchange) == []


def become_while_the_other_dies(directory: Path) -> dict[str, Any]:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    last_step = mock.patch.object(Publisher, "_become_writer", die)
    with (
        mock.patch("weightferry.exporter.collectives.SETTLE_S", 1.0),
        last_step if dist.get_rank() == 1 else mock.MagicMock(),
        pytest.raises(PublishError, match="rank 1 failed"),
    ):
        open_publisher(directory, "half-made")
    return json.loads((directory / "half-made" / "writer.json").read_text())


def test_a_publisher_that_was_not_made_everywhere_is_no_writer_any_more(directory):
    writer, _ = run_on_ranks(become_while_the_other_dies, directory, world_size=2, may_die=[1])
    assert writer["closed"] is True


def test_a_training_that_diverged_is_not_published(directory, tmp_path):
    publisher, model = open_publisher(directory, str(tmp_path / "exchange"))
    with publisher, torch.no_grad():
        next(p for n, p in model.named_parameters() if "layers.1" in n and "lora_B" in n)[0, 0] = float("nan")
        with pytest.raises(PublishError, match=r"the merged model\.layers\.1\S* is not finite"):
            publisher.publish(1)
    assert Exchange.open(tmp_path / "exchange").versions() == []


def test_a_base_that_moved_after_the_start_is_not_published(directory, tmp_path):
    publisher, model = open_publisher(directory, str(tmp_path / "exchange"))
    with publisher:
        weight = base_model(model).model.layers[1].mlp.up_proj.base_layer.weight
        with torch.no_grad():
            weight[3, 3] += 1
        with pytest.raises(BaseMismatchError, match=r"differs from .*up_proj\.weight .* unmerge adapters"):
            publisher.publish(1)


def test_adapters_merged_in_place_are_not_taken_for_the_base(directory, tmp_path):
    publisher, model = open_publisher(directory, str(tmp_path / "exchange"))
    with publisher:
        model.merge_adapter()
        with pytest.raises(UnsupportedError, match=r"q_proj are merged in place; .*unmerge_adapter\(\)"):
            publisher.publish(1)


def test_another_adapter_than_at_the_start_is_refused(directory, tmp_path):
    publisher, model = open_publisher(directory, str(tmp_path / "exchange"))
    with publisher:
        publisher.publish(1)
        base_model(model).model.norm.weight.requires_grad_(True)
        with pytest.raises(Exception, match="other tensors trained, than when the publisher was made"):
            publisher.publish(2)
