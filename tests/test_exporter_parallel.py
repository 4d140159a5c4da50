"""Every rank writes: what is dealt to whom, and that no byte of a version shows it (format.md [4], [5])."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from exporter_ranks import CASES, build, open_exchange, place, publish_cases, shard
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_on_ranks
from tiny_exchange import make_base, publish, writing
from tiny_model import make_odd_model, make_tiny_model, make_tiny_moe

from weightferry.exporter.deal import deal
from weightferry.exporter.publisher import Publisher
from weightferry.shared.errors import UsageError
from weightferry.shared.exchange import Exchange
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


def publish_and_tell(directory: Path, exchange_name: str) -> tuple[Path, list[str]]:
    """Publish "all-linear"; the version's directory, and the shards that this rank wrote."""
    rank, world_size = place()
    case, written = CASES["all-linear"], []
    real = VersionFiles.write_shard

    def write_shard(files: VersionFiles, name: str, *arguments: Any, **options: Any) -> Any:
        written.append(name)
        return real(files, name, *arguments, **options)

    model = shard(build(case, directory), world_size)
    exchange = open_exchange(rank, directory / exchange_name, directory / case.base)
    with mock.patch.object(VersionFiles, "write_shard", write_shard), Publisher(model, exchange) as publisher:
        return publisher.publish(1).wait().path, written


@ranks
def test_every_rank_writes_a_layer(directory):
    (_, first), (_, second) = run_on_ranks(publish_and_tell, directory, "shared", world_size=2)
    assert (first, second) == (["layer-00000.safetensors"], ["layer-00001.safetensors"])


def publish_where_rank_1_sees_another_place(directory: Path) -> tuple[Path, list[str], list[str]]:
    """As on another host that has an older copy of the exchange at the same path, and nothing of now."""
    from weightferry.exporter import desk

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


WORLDS = ["all-linear", "tied, rslora, patterns", "odd sizes", "experts", "head and embedding", "dora"]


@ranks
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_no_byte_of_a_version_shows_how_many_ranks_wrote_it(directory, world_size):
    alone = run_on_ranks(publish_cases, directory, WORLDS, world_size=1)[0]
    together = run_on_ranks(publish_cases, directory, WORLDS, world_size=world_size)[0]
    for name in WORLDS:
        one, many = alone[name], together[name]
        files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
        assert files == sorted(path.relative_to(many) for path in many.rglob("*") if path.is_file())
        for file in (file for file in files if file.name != "manifest.json"):
            assert (one / file).read_bytes() == (many / file).read_bytes(), f"{name}: {file}"
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
