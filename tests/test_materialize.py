"""A version copied out: a complete directory, or nothing and the name of what is wrong."""

from __future__ import annotations

import json

import pytest
from s3_servers import fresh_url, s3_server
from tiny_exchange import CHANGED, UNCHANGED, make_base, publish, writing

from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.command import main
from weightferry.shared.errors import ConfigError, IntegrityError, UnsupportedError
from weightferry.shared.exchange import Exchange
from weightferry.shared.materialize import materialize
from weightferry.shared.verify import verify_exchange


@pytest.fixture(scope="module", params=["directory", "seaweedfs", "moto"])
def place(request, tmp_path_factory):
    """A function that gives an exchange URL of its own, on each kind of store."""
    if request.param == "directory":
        yield lambda: str(tmp_path_factory.mktemp("share") / "exchange")
    else:
        with s3_server(request.param, tmp_path_factory.mktemp(request.param)):
            yield fresh_url


@pytest.fixture
def exchange(place, tmp_path):
    return Exchange.open(place(), base=make_base(tmp_path / "base"))


def test_a_materialized_version_is_a_complete_checkpoint(exchange, tmp_path):
    with writing(exchange) as writer:
        publish(writer, 1)
        version = publish(writer, 2)
    directory = materialize(version, tmp_path / "copy")
    checkpoint, base = Checkpoint.open(directory), Checkpoint.open(tmp_path / "base")
    assert set(checkpoint.specs) == {*CHANGED, *UNCHANGED}
    for name in UNCHANGED:
        assert checkpoint.read_bytes(name) == base.read_bytes(name)
    for name in CHANGED:
        assert checkpoint.read_bytes(name) != base.read_bytes(name)
    assert (directory / "manifest.json").read_bytes() == version.manifest.to_bytes()


def test_a_damaged_shard_is_named_and_nothing_is_left(exchange, tmp_path):
    with writing(exchange) as writer:
        version = publish(writer, 1)
    path = f"{version.dir}/layer-00000.safetensors"
    data = bytearray(version.store.read(path) or b"")
    data[-1] ^= 1
    version.store.replace(path, bytes(data))
    with pytest.raises(IntegrityError, match=r"layer-00000\.safetensors: has other bytes"):
        materialize(version, tmp_path / "copy")
    version.store.remove(path)
    with pytest.raises(
        IntegrityError, match=r"layer-00000\.safetensors: is missing; do not use this version"
    ):
        materialize(version, tmp_path / "copy")
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"]


def test_the_command_holds_a_lease_and_refuses_what_is_there(exchange, tmp_path, capsys):
    with writing(exchange) as writer:
        version = publish(writer, 1)
    url = exchange.store.where("")
    assert main(["materialize", url, str(version.number), str(tmp_path / "copy")]) == 0
    assert "each checked" in capsys.readouterr().out
    assert exchange.store.list("readers") == []
    with pytest.raises(ConfigError, match="is there already"):
        materialize(version, tmp_path / "copy")


def test_the_exchange_behaves_the_same_in_a_bucket(exchange, tmp_path, capsys):
    with writing(exchange, run_id="first") as writer:
        versions = [publish(writer, step) for step in (1, 2, 3)]
    with writing(exchange, run_id="second") as writer:
        versions.append(publish(writer, 4))
    url = exchange.store.where("")
    reader = Exchange.open(url)
    assert [version.step for version in reader.versions()] == [1, 2, 3, 4]
    assert reader.newest_number() == versions[-1].number
    assert verify_exchange(reader) == []
    assert main(["ls", url]) == 0
    assert main(["pin", url, str(versions[0].number)]) == 0
    assert main(["gc", url, "--keep", "1", "--grace-s", "0"]) == 0
    assert [version.step for version in Exchange.open(url).versions()] == [1, 4]
    assert len(exchange.store.list_started("versions")) == 2
    assert verify_exchange(Exchange.open(url)) == []
    assert main(["show", url, str(versions[0].number), "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.rindex('{\n "manifest"') :])["number"] == versions[0].number
    assert len(exchange.store.list("base")) == 1


def test_a_bucket_has_no_paths_and_says_what_to_do(exchange, tmp_path):
    with writing(exchange) as writer:
        version = publish(writer, 1)
    if exchange.store.path is not None:
        assert version.path.is_dir()
        return
    with pytest.raises(UnsupportedError, match="weightferry materialize"):
        _ = version.path
