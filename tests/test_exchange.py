"""The exchange between a writer and its readers: format.md [1] to [5], and the reading side of [7]."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_exchange import CHANGED, UNCHANGED, make_base, publish, writing

from weightferry.shared.beat import Beat
from weightferry.shared.errors import (
    BaseMismatchError,
    ExchangeNotFoundError,
    FormatError,
    IntegrityError,
    UnsupportedError,
    VersionNotFoundError,
    WriterActiveError,
    WriterFencedError,
)
from weightferry.shared.exchange import Exchange
from weightferry.shared.kill_points import VARIABLE
from weightferry.shared.verify import verify_exchange, verify_version
from weightferry.shared.writer import WRITER_NAME, ExchangeWriter

WRITER_PROCESS = Path(__file__).with_name("tiny_exchange.py")
KILL_POINTS = [
    "after-begin",
    "after-shard:1",
    "before-manifest",
    "after-manifest",
    "before-commit",
    "after-commit",
    "after-latest",
]


@pytest.fixture
def base(tmp_path):
    return make_base(tmp_path / "base")


@pytest.fixture
def exchange(tmp_path, base):
    return Exchange.open(tmp_path / "exchange", base=base)


def run_writer(exchange: Exchange, *steps: int, kill_at: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, WRITER_PROCESS, exchange.path, exchange.base_dir, *map(str, steps)]
    environment = os.environ | {VARIABLE: kill_at}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_published_version_is_seen_by_another_reader(exchange):
    with writing(exchange) as writer:
        published = publish(writer, 7)
    reader = Exchange.open(exchange.path)
    latest = reader.latest()
    assert latest is not None
    assert (latest.number, latest.step, latest.run_id) == (published.number, 7, "run-a")
    assert reader.newest_number() == published.number
    assert verify_exchange(reader) == []


def test_a_version_is_a_complete_checkpoint_directory(exchange, base):
    with writing(exchange) as writer:
        version = publish(writer, 1)
    index = json.loads((version.path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {*CHANGED, *UNCHANGED}
    assert {entry.name for entry in version.manifest.tensors if entry.changed} == set(CHANGED)


def test_unchanged_tensors_are_stored_once_and_linked(exchange):
    with writing(exchange) as writer:
        versions = [publish(writer, step) for step in range(3)]
    with writing(exchange, run_id="run-b") as writer:
        versions.append(publish(writer, 3))
    inodes = {(version.path / "outer.same.safetensors").stat().st_ino for version in versions}
    assert len(inodes) == 1
    assert len(list((exchange.path / "base").iterdir())) == 1


def test_a_damaged_base_object_stops_the_next_writer(exchange):
    with writing(exchange) as writer:
        publish(writer, 1)
    (stored,) = (exchange.path / "base").iterdir()
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1
    stored.write_bytes(data)
    with writing(exchange) as writer, pytest.raises(IntegrityError, match="is damaged"):
        publish(writer, 2)


def test_numbers_are_slots_of_the_log_and_never_used_twice(exchange):
    with writing(exchange) as writer:
        first = [publish(writer, step).number for step in (1, 2)]
    with writing(exchange, run_id="run-b") as writer:
        second = [publish(writer, step).number for step in (1, 2)]
    assert (first, second) == ([2, 3], [5, 6])


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_reader_never_sees_a_half_written_version_and_the_next_writer_goes_on(exchange, point):
    with writing(exchange) as writer:
        before = publish(writer, 1)
    killed = run_writer(exchange, 2, kill_at=point)
    assert killed.returncode == -9, killed.stderr
    committed = point in ("after-commit", "after-latest")
    latest = Exchange.open(exchange.path).latest()
    assert latest is not None
    assert latest.step == (2 if committed else 1)
    assert verify_version(latest) == []
    assert committed or latest.number == before.number

    after = run_writer(exchange, 3)
    assert after.returncode == 0, after.stderr
    healed = Exchange.open(exchange.path)
    assert [version.step for version in healed.versions()] == ([1, 2, 3] if committed else [1, 3])
    assert verify_exchange(healed) == []
    directories = {path.name for path in (exchange.path / "versions").iterdir()}
    assert directories == {version.path.name for version in healed.versions()}
    assert not list(exchange.path.rglob(".tmp-*"))


def test_a_pointer_left_behind_by_a_killed_writer_is_mended(exchange):
    assert run_writer(exchange, 1, kill_at="after-commit").returncode == -9
    assert Exchange.open(exchange.path).newest_number() == 0
    with writing(exchange):
        assert exchange.newest_number() == 2


def test_a_second_live_writer_is_refused_by_name(exchange, base):
    with writing(exchange, run_id="first", ttl_s=0.6):
        other = Exchange.open(exchange.path, base=base)
        with pytest.raises(WriterActiveError, match="run first"):
            ExchangeWriter.become(other, run_id="second")


def test_a_writer_that_closed_cleanly_is_not_waited_for(exchange):
    with writing(exchange, run_id="first"):
        pass
    with writing(exchange, run_id="second") as writer:
        assert writer.epoch == 2


def test_a_writer_whose_beat_stands_still_is_replaced_after_its_ttl(exchange):
    with writing(exchange, run_id="first", ttl_s=30):
        pass
    path = exchange.path / WRITER_NAME
    frozen = json.loads(path.read_text()) | {"closed": False, "ttl_s": 0.5}
    frozen["process"]["host"] = "another-host"
    path.write_text(json.dumps(frozen))
    with writing(exchange, run_id="second") as writer:
        assert publish(writer, 1).run_id == "second"


def test_a_zombie_writer_cannot_commit(exchange, base):
    zombie = ExchangeWriter.become(exchange, run_id="zombie")
    publish(zombie, 1)
    zombie.close()  # its successor believes it gone, yet it goes on
    with writing(Exchange.open(exchange.path, base=base), run_id="successor") as successor:
        with pytest.raises(WriterFencedError, match="successor"):
            publish(zombie, 2)
        publish(successor, 3)
    assert [version.step for version in Exchange.open(exchange.path).versions()] == [1, 3]


def test_a_swept_directory_is_only_one_that_no_entry_names(exchange):
    assert run_writer(exchange, 1, 2, kill_at="after-manifest").returncode == -9
    with writing(exchange) as writer:
        assert len(writer.sweep_report) == 1
        publish(writer, 3)


def test_an_exchange_of_another_base_is_refused_naming_both(exchange, tmp_path):
    other = make_base(tmp_path / "other", seed=1)
    with pytest.raises(BaseMismatchError) as caught:
        Exchange.open(exchange.path, base=other)
    assert str(other) in str(caught.value)
    assert exchange.base.tensors_digest[:12] in str(caught.value)


def test_no_exchange_and_no_version_are_said_plainly(exchange, tmp_path):
    with pytest.raises(ExchangeNotFoundError, match="is not an exchange"):
        Exchange.open(tmp_path / "nowhere")
    with pytest.raises(VersionNotFoundError, match="none yet"):
        exchange.version(4)
    with pytest.raises(UnsupportedError, match="give a directory or s3://"):
        Exchange.open("nosuch://bucket/prefix")


def test_an_unknown_format_is_refused_naming_both_numbers(exchange):
    identity = exchange.path / "exchange.json"
    identity.write_text(identity.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(FormatError, match="format 2; this weightferry reads format 1"):
        Exchange.open(exchange.path)


def test_a_lease_stands_while_a_version_is_open_and_is_gone_after(exchange):
    with writing(exchange) as writer:
        number = publish(writer, 1).number
    with exchange.open_version(number, reader="host:1/../x"):
        (lease,) = (exchange.path / "readers").iterdir()
        assert json.loads(lease.read_text())["numbers"] == [number]
    assert list((exchange.path / "readers").iterdir()) == []


def test_a_gap_in_the_log_stops_the_next_writer(exchange):
    with writing(exchange) as writer:
        publish(writer, 1)
        publish(writer, 2)
    (exchange.path / "log" / "000000000002.json").unlink()
    with (
        pytest.raises(IntegrityError, match=r"000000000002\.json: is missing, yet 000000000003\.json"),
        writing(Exchange.open(exchange.path, base=exchange.base_dir)),
    ):
        pass


def test_a_long_log_is_read_in_order_and_up_to_a_gap(exchange):
    for _ in range(40):
        exchange.log.append(kind="epoch", epoch=None, run_id="r", owner="o")
    reader = Exchange.open(exchange.path)
    reader.log.absorb()
    assert [entry.number for entry in reader.log.entries] == list(range(1, 41))
    assert reader.log.highest_epoch == 40
    (exchange.path / "log" / "000000000035.json").unlink()
    gapped = Exchange.open(exchange.path)
    with pytest.raises(IntegrityError, match=r"000000000035\.json: is missing"):
        gapped.log.require_dense()
    assert len(gapped.log.entries) == 34


def test_a_slot_that_is_taken_and_never_readable_ends_in_an_error(exchange, monkeypatch):
    def taken(_path, _data):
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr("weightferry.shared.commit_log.TAKEN_SLOT_DEADLINE_S", 0.2)
    monkeypatch.setattr(exchange.store, "create", taken)
    with pytest.raises(IntegrityError, match=r"000000000001\.json: is taken, yet cannot be read"):
        ExchangeWriter.become(exchange, run_id="r")


def test_a_beat_that_cannot_be_written_is_said_once_and_goes_on_when_it_can(exchange, monkeypatch, caplog):
    real_replace, failing = exchange.store.replace, [True]

    def replace(path, data, *, sync=True):
        if not sync and failing[0]:
            raise OSError(28, "No space left on device", path)
        real_replace(path, data, sync=sync)

    monkeypatch.setattr(exchange.store, "replace", replace)
    beat = Beat(exchange.store, "readers/r.json", lambda count: {"beat": count}, ttl_s=0.03)
    deadline = time.monotonic() + 10
    while beat.last_error is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    failing[0] = False
    while beat.last_error is not None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    beat.close()
    assert caplog.text.count("readers/r.json cannot be rewritten") == 1


def test_files_follow_the_umask(exchange):
    previous = os.umask(0o027)
    try:
        with writing(exchange) as writer:
            version = publish(writer, 1)
    finally:
        os.umask(previous)
    modes = {oct(path.stat().st_mode & 0o777) for path in version.path.iterdir()}
    assert modes == {"0o640"}
