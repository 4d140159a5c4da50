"""A crash before and after every single storage call of two publishes and a pruning, on every store."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest
from audit import audit, audit_clean
from faults import (
    Crash,
    CrashAt,
    Fault,
    LostLinks,
    ShortWrites,
    client_calls,
    posix_calls,
    silent_beats,
)
from s3_servers import NAMES, fresh_url, s3_server
from tiny_exchange import make_base, publish

from weightferry.shared.exchange import Exchange
from weightferry.shared.writer import ExchangeWriter

Under = Callable[[Exchange, Fault], AbstractContextManager]


def two_publishes(exchange: Exchange, acknowledged: list[int]) -> None:
    """Become the writer, publish twice, and let the second one delete what was there before."""
    writer = ExchangeWriter.become(exchange, run_id="r", writer_ttl_s=0, keep=1, grace_s=0)
    for step in (2, 3):
        acknowledged.append(publish(writer, step).number)


def begin(url: str, base: Path) -> list[int]:
    """An exchange with one version."""
    with silent_beats():
        writer = ExchangeWriter.become(Exchange.open(url, base=base), run_id="before", writer_ttl_s=0)
        return [publish(writer, 1).number]


def recover(url: str, base: Path) -> int:
    with silent_beats():
        writer = ExchangeWriter.become(
            Exchange.open(url, base=base), run_id="after", writer_ttl_s=0, keep=2, grace_s=0
        )
        number = publish(writer, 4).number
        writer.close()
    return number


def crash_and_recover(url: str, base: Path, under: Under, fault: CrashAt) -> None:
    acknowledged: list[int] = []
    exchange = Exchange.open(url, base=base)
    with suppress(Crash), under(exchange, fault):
        two_publishes(exchange, acknowledged)
    assert fault.is_dead, "the fault never came"
    where = f"crash {'after' if fault.after else 'before'} call {fault.at}"
    assert audit(url, acknowledged) == [], where
    acknowledged.append(recover(url, base))
    assert audit_clean(url, acknowledged) == [], where


def on_posix(_exchange: Exchange, fault: Fault) -> AbstractContextManager:
    return posix_calls(fault)


def in_bucket(exchange: Exchange, fault: Fault) -> AbstractContextManager:
    return client_calls(exchange.store, fault)


def count_calls(url: str, base: Path, under: Under) -> int:
    fault, exchange = Fault(), Exchange.open(url, base=base)
    with under(exchange, fault):
        two_publishes(exchange, [])
    return fault.num_calls


@pytest.fixture
def memory_path(tmp_path) -> Iterator[Path]:
    """A directory in memory where there is one: these tests fsync some 50,000 times."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("after", [False, True])
def test_on_a_directory_no_crash_tears_or_loses_anything(memory_path, after):
    tmp_path = memory_path
    base = make_base(tmp_path / "base")
    begin(str(tmp_path / "template"), base)
    shutil.copytree(tmp_path / "template", tmp_path / "counted")
    num_calls = count_calls(str(tmp_path / "counted"), base, on_posix)
    assert num_calls > 100
    for at in range(1, num_calls + 1):
        url = tmp_path / "exchange"
        shutil.copytree(tmp_path / "template", url)
        crash_and_recover(str(url), base, on_posix, CrashAt(at, after=after))
        shutil.rmtree(url)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_on_s3_no_crash_tears_or_loses_anything(tmp_path, name, after):
    base = make_base(tmp_path / "base")
    with s3_server(name, tmp_path):
        url = fresh_url()
        begin(url, base)
        num_calls = count_calls(url, base, in_bucket)
        assert num_calls > 20
        for at in range(1, num_calls + 1):
            url = fresh_url()
            begin(url, base)
            crash_and_recover(url, base, in_bucket, CrashAt(at, after=after))


@pytest.mark.parametrize("fault", [ShortWrites, LostLinks])
def test_a_file_system_that_is_awkward_all_the_time_is_endured(tmp_path, fault):
    base = make_base(tmp_path / "base")
    url, acknowledged = str(tmp_path / "exchange"), []
    exchange = Exchange.open(url, base=base)
    with posix_calls(fault()):
        two_publishes(exchange, acknowledged)
        assert audit_clean(url, acknowledged) == []
