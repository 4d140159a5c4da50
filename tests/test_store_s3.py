"""The store contract on two real S3 servers, and what is special to buckets."""

from __future__ import annotations

import subprocess
import sys

import pytest
from s3_servers import NAMES, fresh_url, s3_server
from store_contract import StoreContract, nothing

from weightferry.shared.errors import UnsupportedError
from weightferry.shared.object_store import ObjectStore, open_object_store


@pytest.fixture(scope="module", params=NAMES)
def server(request, tmp_path_factory):
    with s3_server(request.param, tmp_path_factory.mktemp(request.param)) as endpoint:
        yield endpoint


class TestObjectStore(StoreContract):
    @pytest.fixture
    def stores(self, server):
        url = fresh_url()
        return lambda: open_object_store(url)

    def test_an_unfinished_upload_is_hidden_yet_found_and_aborted(self, store, stores):
        def write_and_fail() -> None:
            with store.new_file("versions/a/half") as file:
                file.write(bytes(40 << 20))
                assert store.list("versions") == []
                assert stores().list_started("versions") == ["a"]
                stores().remove_tree("versions/a", first="manifest.json", after_first=nothing)
                assert store.list_started("versions") == []
                raise KeyError

        with pytest.raises(KeyError):
            write_and_fail()

    def test_a_sweep_aborts_the_uploads_directly_in_a_directory_and_no_others(self, store, stores):
        code = (
            "import os, sys; from weightferry.shared.object_store import open_object_store\n"
            "store = open_object_store(sys.argv[1])\n"
            "with store.new_file('base/shard') as one, store.new_file('versions/a/half') as two:\n"
            "    one.write(bytes(40 << 20)); two.write(bytes(40 << 20)); os.kill(os.getpid(), 9)"
        )
        subprocess.run([sys.executable, "-c", code, store.where("")], timeout=120, check=False)
        assert store.list_started("base") == ["shard"]
        assert [store.sweep(directory) for directory in ("", "versions", "base")] == [0, 0, 1]
        assert store.list_started("base") == []
        assert store.list_started("versions") == ["a"]

    def test_a_look_at_a_small_file_is_one_request(self, store, monkeypatch):
        store.replace("latest.json", b"1")
        requests, real_call = [], store._fs._call_s3

        async def count(method, *arguments, **options):
            requests.append(method)
            return await real_call(method, *arguments, **options)

        monkeypatch.setattr(store._fs, "_call_s3", count)
        assert store.read("latest.json") == b"1"
        assert store.read("absent.json") is None
        assert requests == ["get_object", "get_object"]

    def test_a_lost_answer_to_our_own_put_is_settled(self, store, monkeypatch):
        store.create("log/0", b"proved")
        real_pipe = store._fs.pipe_file

        def pipe_whose_answer_is_lost(path, data, **options):
            real_pipe(path, data, **options)
            raise TimeoutError("the answer was lost")

        monkeypatch.setattr(store._fs, "pipe_file", pipe_whose_answer_is_lost)
        store.create("log/1", b"ours")
        assert store.read("log/1") == b"ours"

    def test_a_put_that_never_arrives_is_an_error_that_names_the_place(self, store, monkeypatch):
        store.create("log/0", b"proved")

        def unreachable(*_arguments, **_options):
            raise RuntimeError("no route")

        monkeypatch.setattr(store._fs, "pipe_file", unreachable)
        monkeypatch.setattr("weightferry.shared.object_store.time.sleep", lambda _seconds: None)
        with pytest.raises(OSError, match=r"s3://.*/log/1: could not be created .* check the object store"):
            store.create("log/1", b"ours")

    def test_a_server_that_ignores_conditions_is_refused(self, store, monkeypatch):
        real_pipe = store._fs.pipe_file
        monkeypatch.setattr(store._fs, "pipe_file", lambda path, data, **_: real_pipe(path, data))
        with pytest.raises(UnsupportedError, match="ignores conditional puts"):
            store.create("log/1", b"ours")
        assert store.read("log/1") is None

    def test_a_writer_killed_in_an_upload_leaves_nothing_to_see(self, stores, store):
        code = (
            "import os, sys; from weightferry.shared.object_store import open_object_store\n"
            "with open_object_store(sys.argv[1]).new_file('versions/a/half') as file:\n"
            "    file.write(bytes(40 << 20)); os.kill(os.getpid(), 9)"
        )
        done = subprocess.run([sys.executable, "-c", code, store.where("")], timeout=120, check=False)
        assert done.returncode == -9
        assert store.list("versions") == []
        assert store.list_started("versions") == ["a"]
        store.remove_tree("versions/a", first="manifest.json", after_first=nothing)
        assert store.list_started("versions") == []


def test_a_missing_client_and_a_whole_bucket_are_refused_with_the_way_out():
    with pytest.raises(UnsupportedError, match="give a directory or s3://"):
        open_object_store("nosuch://bucket/prefix")
    with pytest.raises(UnsupportedError, match="give a prefix in it"):
        open_object_store("memory://bucket")


class TestAnyFsspecStore(StoreContract):
    """fsspec's own memory file system stands for stores without S3's calls."""

    @pytest.fixture
    def stores(self):
        import fsspec

        file_system = fsspec.filesystem("memory", skip_instance_cache=True)
        file_system.store, file_system.pseudo_dirs = {}, [""]
        return lambda: ObjectStore(file_system, "/bucket/prefix", "memory://bucket/prefix")
