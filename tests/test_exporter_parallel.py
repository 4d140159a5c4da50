"""Every rank writes: what is dealt to whom, and that no byte of a version shows it (format.md [4], [5])."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from exporter_ranks import CASES, build, open_exchange, place, publish_cases, shard, without_shared_pages
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.lora.config import BdLoraConfig
from ranks import run_on_ranks
from tiny_exchange import make_base, publish, writing
from tiny_model import make_odd_model, make_tiny_gpt_oss, make_tiny_model, make_tiny_moe
from torch.distributed.tensor import DTensor

from weightferry.exporter import desk
from weightferry.exporter.deal import deal
from weightferry.exporter.model_walk import base_model
from weightferry.exporter.publisher import Publisher
from weightferry.exporter.row_merge import RowMerge
from weightferry.shared.durable import FilePart
from weightferry.shared.errors import BaseMismatchError, PublishError, UnsupportedError, UsageError
from weightferry.shared.exchange import Exchange
from weightferry.shared.tensor_files import read_header
from weightferry.shared.verify import verify_exchange
from weightferry.shared.version_files import VersionFiles

ranks = pytest.mark.ranks


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parallel")
    make_tiny_model(path / "tiny")
    make_tiny_model(path / "tied", tied=True)
    make_odd_model(path / "odd")
    make_tiny_moe(path / "moe")
    make_tiny_gpt_oss(path / "gpt-oss")
    return path


@given(st.lists(st.integers(0, 1 << 40), max_size=40), st.integers(1, 9))
def test_every_unit_is_dealt_once_and_a_round_gives_a_rank_one_unit_at_most(sizes, num_ranks):
    rounds = deal(sizes, num_ranks)
    assert sorted(unit for dealt in rounds for unit, _ in dealt) == list(range(len(sizes)))
    for dealt in rounds:
        assert len({rank for _, rank in dealt}) == len(dealt)
        assert all(0 <= rank < num_ranks for _, rank in dealt)


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=40), st.integers(1, 9))
def test_no_rank_gets_more_bytes_than_another_by_more_than_the_largest_unit(sizes, num_ranks):
    loads = [0] * num_ranks
    for unit, rank in (pair for dealt in deal(sizes, num_ranks) for pair in dealt):
        loads[rank] += sizes[unit]
    assert max(loads) - min(loads) <= max(sizes)


def publish_dealt(directory: Path, exchange_name: str) -> tuple[Path, list[str]]:
    with without_shared_pages():
        return publish_and_tell(directory, exchange_name)


def publish_and_tell(directory: Path, exchange_name: str) -> tuple[Path, list[str]]:
    """Publish "all-linear"; the version's directory, and the shards that this rank wrote alone."""
    rank, world_size = place()
    case, written = CASES["all-linear"], list[str]()
    real = VersionFiles.write_shard

    def write_shard(files: VersionFiles, name: str, *arguments: Any, **options: Any) -> Any:
        written.append(name)
        return real(files, name, *arguments, **options)

    model = shard(build(case, directory), world_size)
    exchange = open_exchange(rank, directory / exchange_name, directory / case.base)
    with mock.patch.object(VersionFiles, "write_shard", write_shard), Publisher(model, exchange) as publisher:
        return publisher.publish(1).wait().path, written


@ranks
def test_where_ranks_share_no_pages_every_rank_writes_a_layer(directory):
    (_, first), (_, second) = run_on_ranks(publish_dealt, directory, "dealt", world_size=2)
    assert (first, second) == (["layer-00000.safetensors"], ["layer-00001.safetensors"])


def publish_by_rows(directory: Path, exchange_name: str) -> tuple[Path, list[str], list[list], int]:
    """As `publish_and_tell`; also what this rank wrote into joint shards, and how many weights it had."""
    spans, num_whole = [], 0
    real_write, real_full = FilePart.write_at, DTensor.full_tensor

    def write_at(part: FilePart, offset: int, data: Any) -> None:
        spans.append([part.path.name, offset, len(data)])
        real_write(part, offset, data)

    def full_tensor(tensor: DTensor, **options: Any) -> Any:
        nonlocal num_whole
        num_whole += min(tensor.shape) > 4  # A and B have rank 4
        return real_full(tensor, **options)

    real_write_units = Publisher._write_units

    def write_units(publisher: Publisher, begun: dict[str, Any]) -> Any:
        with mock.patch.object(DTensor, "full_tensor", full_tensor):
            return real_write_units(publisher, begun)

    rows = mock.patch.object(FilePart, "write_at", write_at)
    with rows, mock.patch.object(Publisher, "_write_units", write_units):
        path, written = publish_and_tell(directory, exchange_name)
    return path, written, spans, num_whole


@ranks
def test_by_rows_every_rank_writes_half_of_each_layer_and_gathers_only_the_factors(directory):
    both = run_on_ranks(publish_by_rows, directory, "by-rows", world_size=2)
    assert [written for _, written, _, _ in both] == [[], []]
    assert [num_whole for _, _, _, num_whole in both] == [0, 0]
    path = both[0][0]
    for shard_name in ("layer-00000.safetensors", "layer-00001.safetensors"):
        spans = [[size for name, _, size in spans if name == shard_name] for _, _, spans, _ in both]
        header = min(slot.begin for slot in read_header(path / shard_name).values())
        assert sum(map(sum, spans)) == (path / shard_name).stat().st_size - header
        assert sum(spans[0]) == sum(spans[1])
    assert (path / "layer-00000.safetensors").read_bytes() == (
        run_on_ranks(publish_dealt, directory, "as-dealt", world_size=2)[0][0] / "layer-00000.safetensors"
    ).read_bytes()


def publish_with_a_gap(directory: Path) -> tuple[str, str]:
    """A rank that forgets a piece, then one that does not."""
    rank, world_size = place()
    case = CASES["all-linear"]
    model = shard(build(case, directory), world_size)
    exchange = open_exchange(rank, directory / "gap", directory / case.base)

    def forget(*_arguments: Any) -> None:
        pass

    with Publisher(model, exchange) as publisher:
        fault = mock.patch.object(RowMerge, "_write_rows", forget) if rank == 1 else mock.MagicMock()
        with fault, pytest.raises(PublishError) as caught:
            publisher.publish(1)
        return str(caught.value), str(publisher.publish(2).wait().path)


@ranks
def test_a_gap_in_what_ranks_wrote_together_is_no_version(directory):
    (first, path), (second, _) = run_on_ranks(publish_with_a_gap, directory, world_size=2)
    assert first == second
    assert "the ranks did not write the whole of model.layers.0" in first
    assert [version.path for version in Exchange.open(directory / "gap").versions()] == [Path(path)]


def publish_diverged_rows(directory: Path) -> str:
    """One element of one B is not a number: only rank 1 merges its row."""
    rank, world_size = place()
    case = CASES["all-linear"]
    model = build(case, directory)
    with torch.no_grad():
        model.get_parameter("base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight")[-1, 0] = (
            torch.nan
        )
    exchange = open_exchange(rank, directory / "diverged", directory / case.base)
    with Publisher(shard(model, world_size), exchange) as publisher, pytest.raises(PublishError) as caught:
        publisher.publish(1)
    return str(caught.value)


@ranks
def test_rows_that_diverged_are_no_version(directory):
    first, second = run_on_ranks(publish_diverged_rows, directory, world_size=2)
    assert first == second
    assert "rank 1 failed: the merged model.layers.1.mlp.up_proj.weight is not finite" in first
    assert Exchange.open(directory / "diverged").versions() == []


def publish_onto_changed_rows(directory: Path) -> str:
    """One element of the base moves, in the rows of rank 1 alone."""
    rank, world_size = place()
    case = CASES["all-linear"]
    model = shard(build(case, directory), world_size)
    exchange = open_exchange(rank, directory / "moved", directory / case.base)
    with Publisher(model, exchange) as publisher:
        if rank == 1:
            weight = base_model(model).model.layers[0].self_attn.q_proj.base_layer.weight
            weight.to_local()[0, 0] += 1
        with pytest.raises(BaseMismatchError) as caught:
            publisher.publish(1)
    return str(caught.value)


@ranks
def test_rows_that_are_no_longer_the_bases_are_named_on_every_rank(directory):
    first, second = run_on_ranks(publish_onto_changed_rows, directory, world_size=2)
    assert first == second
    assert "in model.layers.0.self_attn.q_proj.weight (other values)" in first
    assert Exchange.open(directory / "moved").versions() == []


def publish_an_adapter_added_late(directory: Path) -> tuple[str, str]:
    """One whose B is block-diagonal: the rows of a block are not rows of the merged weight."""
    rank, world_size = place()
    case = CASES["queries only"]
    model = shard(build(case, directory), world_size)
    exchange = open_exchange(rank, directory / "late", directory / case.base)
    with Publisher(model, exchange, publish="merged") as publisher:
        blocks = BdLoraConfig(target_modules_bd_b=["q_proj"], nblocks=2)
        model.add_adapter("late", LoraConfig(r=4, target_modules=["q_proj"], use_bdlora=blocks))
        model.set_adapter("late")
        with pytest.raises(UnsupportedError) as caught:
            publisher.publish(1)
        model.delete_adapter("late")
        model.set_adapter("default")
        return str(caught.value), str(publisher.publish(2).wait().path)


@ranks
def test_an_adapter_added_late_that_does_not_merge_by_rows_is_no_version(directory):
    (first, path), (second, _) = run_on_ranks(publish_an_adapter_added_late, directory, world_size=2)
    assert first == second
    assert "added since the publisher was made cannot be merged row by row" in first
    assert [version.path for version in Exchange.open(directory / "late").versions()] == [Path(path)]


def publish_where_rank_1_sees_another_place(directory: Path) -> tuple[Path, list[str], list[str]]:
    """As on another host that has an older copy of the exchange at the same path, and nothing of now."""
    real, copy = Exchange.open, directory / "copy"
    if dist.get_rank() == 0:
        Exchange.open(directory / "alone", base=directory / "tiny")
        shutil.copytree(directory / "alone", copy)
    dist.barrier()
    lines: list[str] = []
    elsewhere = mock.patch.object(desk.Exchange, "open", lambda url, **options: real(copy, **options))
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("weightferry.exporter.desk").addHandler(handler)
    with elsewhere if dist.get_rank() == 1 else mock.MagicMock():
        path, written = publish_and_tell(directory, "alone")
    return path, written, lines


@ranks
def test_where_one_rank_does_not_reach_the_exchange_rank_0_writes_alone_and_says_so_once(directory):
    (path, first, lines), (_, second, others) = run_on_ranks(
        publish_where_rank_1_sees_another_place, directory, world_size=2
    )
    assert (first, second) == (["layer-00000.safetensors", "layer-00001.safetensors"], [])
    assert len(lines) == 1
    assert lines[0].startswith(
        "rank 0 writes every version alone: rank 1 does not reach the exchange (what rank"
    )
    assert others == []
    exchange = Exchange.open(directory / "alone")
    assert verify_exchange(exchange) == []
    assert not list(exchange.path.glob(".tmp-*"))
    assert path.is_dir()


WORLDS = [
    "all-linear", "queries only", "tied, rslora, patterns", "odd sizes", "experts", "head and embedding",
    "experts, inputs first", "dora", "biases",
]  # fmt: skip


def publish_cases_dealt(directory: Path, names: list[str]) -> dict[str, Path]:
    with without_shared_pages():
        return publish_cases(directory, names)


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, Path]:
    return run_on_ranks(publish_cases, directory, WORLDS, world_size=1)[0]


@ranks
@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        (2, publish_cases),
        (3, publish_cases),
        (2, publish_cases_dealt),
        pytest.param(3, publish_cases_dealt, marks=pytest.mark.slow),
        pytest.param(4, publish_cases, marks=pytest.mark.slow),
        pytest.param(4, publish_cases_dealt, marks=pytest.mark.slow),
    ],
)
def test_no_byte_of_a_version_shows_how_many_ranks_wrote_it(directory, alone, world_size, way):
    compare_with_one_rank(directory, alone, WORLDS, world_size, way)


@ranks
def test_nor_with_one_expert_a_rank(directory, alone):
    compare_with_one_rank(directory, alone, ["experts", "experts, inputs first"], 4, publish_cases)


def fidelity_of(version: Path) -> dict[str, dict[str, float]]:
    """The figures of each tensor and of all; partial sums of ranks may round otherwise."""
    fidelity = json.loads((version / "manifest.json").read_bytes())["fidelity"]
    return {"total": fidelity["total"], **fidelity["modules"]}


def compare_with_one_rank(
    directory: Path, alone: dict[str, Path], names: list[str], world_size: int, way: Callable
) -> None:
    for stale in directory.glob(f"exchange-{world_size}-*"):
        shutil.rmtree(stale)
    together = run_on_ranks(way, directory, names, world_size=world_size)[0]
    for name in names:
        one, many = alone[name], together[name]
        files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
        assert files == sorted(path.relative_to(many) for path in many.rglob("*") if path.is_file())
        for file in (file for file in files if file.name != "manifest.json"):
            assert (one / file).read_bytes() == (many / file).read_bytes(), f"{name}: {file}"
        assert fidelity_of(many) == {key: pytest.approx(of) for key, of in fidelity_of(one).items()}, name
        exchange = Exchange.open(many.parent.parent)
        assert verify_exchange(exchange) == []


def test_a_committed_version_cannot_be_abandoned(tmp_path):
    exchange = Exchange.open(tmp_path / "exchange", base=make_base(tmp_path / "base"))
    with writing(exchange) as writer:
        publication = writer.begin(1)
        with mock.patch.object(writer, "begin", return_value=publication):
            version = publish(writer, 1)
        with pytest.raises(UsageError, match=f"is version {version.number}, committed; nothing was removed"):
            publication.abandon()
    assert verify_exchange(exchange) == []
