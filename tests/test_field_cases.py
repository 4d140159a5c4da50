"""Failures that people met in public with systems of this kind, as far as the exchange answers for them."""

from __future__ import annotations

import grp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tiny_exchange import make_base, publish, writing

from weightferry.shared.errors import ConfigError, FormatError, IntegrityError
from weightferry.shared.exchange import Exchange
from weightferry.shared.manifest import Manifest
from weightferry.shared.materialize import materialize
from weightferry.shared.verify import verify_version
from weightferry.shared.writer import ExchangeWriter

NOBODY = 65534


@pytest.fixture
def exchange(tmp_path):
    return Exchange.open(tmp_path / "exchange", base=make_base(tmp_path / "base"))


def test_case_5_retention_never_deletes_under_a_slow_reader(exchange, tmp_path):
    """keep 1, a reader that takes 2 s, three versions 200 ms apart, real beats and clocks."""
    writer = ExchangeWriter.become(exchange, run_id="r", keep=1, grace_s=0)
    number, errors, started = publish(writer, 1).number, [], threading.Event()

    def read_slowly() -> None:
        try:
            with Exchange.open(exchange.path).open_version(number, reader="slow") as version:
                started.set()
                for turn in range(4):
                    time.sleep(0.5)
                    materialize(version, tmp_path / f"copy-{turn}")
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    assert started.wait(10)
    for step in (2, 3, 4):
        publish(writer, step)
        time.sleep(0.2)
    thread.join(30)
    assert errors == []
    publish(writer, 5)
    writer.close()
    assert [path.name for path in (exchange.path / "versions").iterdir()] == [
        version.path.name for version in exchange.versions()
    ]


def test_case_5_a_directory_deleted_by_hand_between_two_shards_is_an_error_and_no_half_copy(
    exchange, tmp_path, monkeypatch
):
    with writing(exchange) as writer:
        version = publish(writer, 1)
    real_open, opened = exchange.store.open, []

    def open_and_delete_the_rest(path):
        opened.append(path)
        if len(opened) == 2:
            shutil.rmtree(version.path)
        return real_open(path)

    monkeypatch.setattr(version.store, "open", open_and_delete_the_rest)
    _ = version.manifest
    with pytest.raises(IntegrityError, match="is missing"):
        materialize(version, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def make_empty(path: Path) -> None:
    path.mkdir()


def make_one_shard_short(path: Path, good: Path) -> None:
    shutil.copytree(good, path)
    (path / "layer-00000.safetensors").unlink()


def make_without_manifest(path: Path, good: Path) -> None:
    shutil.copytree(good, path)
    (path / "manifest.json").unlink()


def test_case_7_directories_made_by_hand_are_no_versions(exchange):
    with writing(exchange) as writer:
        good = publish(writer, 1)
    versions = exchange.path / "versions"
    make_empty(versions / "step00000002-e0001-aaaaaa")
    make_one_shard_short(versions / "step00000003-e0001-bbbbbb", good.path)
    make_without_manifest(versions / "step00000004-e0001-cccccc", good.path)
    shutil.copytree(good.path, versions / "step00000005-e0001-dddddd")
    reader = Exchange.open(exchange.path)
    assert [version.number for version in reader.versions()] == [good.number]
    assert reader.newest_number() == good.number


def missing_shard(path: Path) -> str:
    (path / "layer-00000.safetensors").unlink()
    return "layer-00000.safetensors: is missing"


def extra_old_shard(path: Path) -> str:
    shutil.copy(path / "layer-00000.safetensors", path / "layer-00001.safetensors")
    return "layer-00001.safetensors: is not named by the manifest"


def index_lists_what_no_shard_has(path: Path) -> str:
    index = path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.layers.9.weight"] = "layer-00000.safetensors"
    index.write_text(json.dumps(value))
    return "model.safetensors.index.json: misplaces model.layers.9.weight: no entry expected"


def shard_holds_what_the_index_lacks(path: Path) -> str:
    index = path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    del value["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(value))
    return "model.safetensors.index.json: misplaces model.norm.weight: outer.same.safetensors expected"


@pytest.mark.parametrize(
    "damage",
    [missing_shard, extra_old_shard, index_lists_what_no_shard_has, shard_holds_what_the_index_lacks],
)
def test_case_12_index_and_shards_that_disagree_are_named(exchange, damage):
    with writing(exchange) as writer:
        version = publish(writer, 1)
    words = damage(version.path)
    findings = [str(finding) for finding in verify_version(version)]
    assert any(words in finding for finding in findings), findings


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "versions/../../x", "org//name", "a\\b", "", "./x", "~/x"]
)
def test_case_15_a_manifest_cannot_lead_out_of_the_exchange(exchange, path):
    with writing(exchange) as writer:
        version = publish(writer, 1)
    value = json.loads(version.manifest.to_bytes())
    value["files"][0]["path"] = path
    with pytest.raises(FormatError, match="is refused: a path must be relative"):
        Manifest.from_bytes(json.dumps(value).encode(), "manifest.json")


def test_case_15_a_symbolic_link_out_of_the_exchange_is_refused(exchange, tmp_path):
    with writing(exchange) as writer:
        version = publish(writer, 1)
    shutil.copy(version.path / "config.json", tmp_path / "outside.json")
    (version.path / "config.json").unlink()
    (version.path / "config.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(IntegrityError, match="leads out of the exchange"):
        materialize(version, tmp_path / "copy")
    assert [finding.problem for finding in verify_version(version)] == ["leads out of the exchange"]


def test_a_published_file_is_never_opened_for_writing_again():
    """Traced by the interpreter's own audit events, through a take-over, pruning, reading and repairing."""
    code = Path(__file__).with_name("traced_story.py")
    done = subprocess.run([sys.executable, code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["touched"] == []
    assert report["num_events"] > 300, "the trace saw nothing"


def other_group() -> int:
    """A group of this user besides its first one; root may take any."""
    if os.geteuid() == 0:
        return grp.getgrnam("daemon").gr_gid
    return next((gid for gid in os.getgroups() if gid != os.getegid()), os.getegid())


def read_as_group(group: int, url: Path) -> list[str]:
    """What another user of that group finds wrong; forked, as he may not see this Python's files."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(group)
                os.setuid(NOBODY)
            exchange = Exchange.open(url)
            with exchange.open_version(exchange.newest_number(), reader="r") as version:
                findings = [str(finding) for finding in verify_version(version)]
        except BaseException as error:
            findings = [repr(error)]
        os.write(write_end, json.dumps(findings).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        findings = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return findings


def test_a_reader_of_the_same_group_reads_and_leases_under_umask_027_and_setgid():
    group, previous = other_group(), os.umask(0o027)
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            share = Path(folder, "share")
            share.mkdir()
            os.chown(share, -1, group)
            share.chmod(0o2750)
            exchange = Exchange.open(share / "exchange", base=make_base(Path(folder, "base")))
            with writing(exchange) as writer:
                publish(writer, 1)
            for path in exchange.path.rglob("*"):
                status = path.stat()
                assert status.st_gid == group, path
                assert status.st_mode & 0o047 == 0o040, (path, oct(status.st_mode))
            assert read_as_group(group, exchange.path) == []
            assert list((exchange.path / "readers").iterdir()) == []
    finally:
        os.umask(previous)


def test_a_reader_that_may_not_leave_a_lease_is_told_what_to_do(exchange, monkeypatch):
    with writing(exchange) as writer:
        number = publish(writer, 1).number

    def refuse(*_arguments, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(exchange.store, "replace", refuse)
    with (
        pytest.raises(ConfigError, match=r"readers: a reader must .*chmod g\+w"),
        exchange.open_version(number, reader="r"),
    ):
        pass
