"""The store contract on a directory, and on one that lags as NFS does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from nfs_store import NfsClient
from store_contract import StoreContract

from weightferry.shared import durable
from weightferry.shared.store import LocalStore, open_store


class TestLocalStore(StoreContract):
    @pytest.fixture
    def stores(self, tmp_path):
        return lambda: LocalStore(tmp_path)


class TestLocalStoreOnNfs(StoreContract):
    """Clock standing still: whatever is cached never times out by itself."""

    @pytest.fixture
    def stores(self, tmp_path):
        with NfsClient(os, lambda: 1000.0).mounted():
            yield lambda: LocalStore(tmp_path)


def test_the_nfs_view_does_lag_where_the_directory_is_not_opened(tmp_path):
    client = NfsClient(os, lambda: 1000.0)
    with client.mounted():
        with pytest.raises(FileNotFoundError):
            (tmp_path / "slot").read_bytes()
        (tmp_path / "slot").write_bytes(b"there")
        with pytest.raises(FileNotFoundError):
            (tmp_path / "slot").read_bytes()
        assert durable.read_fresh(tmp_path / "slot") == b"there"


def test_a_full_nfs_server_shows_at_fsync_and_nothing_appears(tmp_path):
    client = NfsClient(os, lambda: 1000.0)
    client.full = True
    store = LocalStore(tmp_path)
    with client.mounted():
        for act in (store.create, store.replace):
            with pytest.raises(OSError, match="No space"):
                act("slot", b"data")
        with pytest.raises(OSError, match="No space"), store.new_file("large") as file:
            file.write(b"data")
    assert os.listdir(tmp_path) == []


def test_paths_and_file_urls_are_directories(tmp_path):
    assert open_store(tmp_path).path == tmp_path
    assert open_store(f"file://{tmp_path}").path == tmp_path
    assert open_store("relative").path == Path.cwd() / "relative"
