"""What every store promises (shared/store.py); each back end inherits these tests and gives a `store`."""

from __future__ import annotations

import os
import threading

import pytest

from weightferry.shared.digest import xxh3_128
from weightferry.shared.store import Store


def nothing() -> None:
    pass


class StoreContract:
    """Derive a class with a fixture `stores`: a function that opens the same empty place anew."""

    @pytest.fixture
    def store(self, stores) -> Store:
        store = stores()
        for directory in ("log", "versions", "readers", "base"):
            store.make_directory(directory)
        return store

    def test_what_was_created_is_read_and_listed(self, store):
        store.create("log/000000000001.json", b"one")
        assert store.read("log/000000000001.json") == b"one"
        assert store.read("log/000000000002.json") is None
        assert store.list("log") == ["000000000001.json"]
        assert store.size("log/000000000001.json") == 3
        assert store.size("log/000000000002.json") is None
        assert store.list("nowhere") == []

    def test_creation_is_exclusive(self, store, stores):
        store.create("log/slot", b"ours")
        with pytest.raises(FileExistsError):
            stores().create("log/slot", b"theirs")
        assert store.read("log/slot") == b"ours"

    def test_exactly_one_of_many_racing_creators_wins(self, store, stores):
        for attempt in range(5):
            path, wins, start = f"log/{attempt}", [], threading.Barrier(6)

            def create(name: str, path=path, wins=wins, start=start) -> None:
                mine = stores()
                mine.read(path)
                start.wait(30)
                try:
                    mine.create(path, name.encode() * 500)
                    wins.append(name)
                except FileExistsError:
                    pass

            threads = [threading.Thread(target=create, args=(str(i),)) for i in range(6)]
            [thread.start() for thread in threads]
            [thread.join(60) for thread in threads]
            assert len(wins) == 1
            assert store.read(path) == wins[0].encode() * 500

    def test_nothing_is_seen_stale_by_another_client(self, store, stores):
        other = stores()
        for turn in range(20):
            assert other.read(f"log/{turn}") is None
            assert other.list("readers") == [f"r{old:02}" for old in range(turn)]
            store.replace("latest.json", str(turn).encode())
            store.create(f"log/{turn}", b"x")
            store.replace(f"readers/r{turn:02}", b"lease", sync=False)
            assert other.read("latest.json") == str(turn).encode()
            assert other.read(f"log/{turn}") == b"x"
            assert f"r{turn:02}" in other.list("readers")
            if turn < 10:
                continue
            store.remove(f"readers/r{turn:02}")
            assert f"r{turn:02}" not in other.list("readers")
            store.replace(f"readers/r{turn:02}", b"lease", sync=False)
        store.remove("readers/none")

    def test_a_replaced_file_is_never_seen_torn_or_absent(self, store, stores):
        store.replace("latest.json", b"0" * 3000)
        stop, seen = threading.Event(), []

        def watch() -> None:
            mine = stores()
            while not stop.is_set():
                seen.append(mine.read("latest.json"))

        thread = threading.Thread(target=watch)
        thread.start()
        for turn in range(60):
            store.replace("latest.json", str(turn % 10).encode() * 3000, sync=False)
        stop.set()
        thread.join(30)
        assert seen
        assert all(data is not None and len(data) == 3000 and len(set(data)) == 1 for data in seen)

    @pytest.mark.parametrize("size_bytes", [0, 1, 5 << 20, 40 << 20])
    def test_a_large_file_is_whole_digested_and_readable_anywhere(self, store, size_bytes):
        data = os.urandom(1 << 16) * (size_bytes >> 16) or b"x" * size_bytes
        with store.new_file("versions/big") as file:
            for start in range(0, len(data), 3 << 20):
                file.write(memoryview(data)[start : start + (3 << 20)])
        assert (file.digest.size_bytes, file.digest.xxh3_128) == (len(data), xxh3_128(data))
        store.seal(["versions"])
        assert store.size("versions/big") == len(data)
        with store.open("versions/big") as reader:
            assert reader.read() == data
            reader.seek(len(data) // 2)
            assert reader.read(1000) == data[len(data) // 2 :][:1000]
        with pytest.raises(FileNotFoundError), store.open("versions/none") as reader:
            reader.read()

    @pytest.mark.parametrize("size_bytes", [10, 40 << 20])
    def test_a_failed_write_leaves_nothing(self, store, size_bytes):
        def write_and_fail() -> None:
            with store.new_file("versions/a/half") as file:
                file.write(bytes(size_bytes))
                raise KeyError

        store.make_directory("versions/a")
        with pytest.raises(KeyError):
            write_and_fail()
        assert store.size("versions/a/half") is None
        assert store.files_below("versions") == []

    def test_trees_are_listed_and_removed_with_the_named_file_first(self, store):
        store.make_directory("versions/a/adapter")
        for name in ("manifest.json", "shard", "adapter/weights"):
            with store.new_file(f"versions/a/{name}") as file:
                file.write(b"data")
        expected = ["versions/a/adapter/weights", "versions/a/manifest.json", "versions/a/shard"]
        assert store.files_below("versions/a") == expected
        assert store.list("versions") == ["a"]
        half = []
        store.remove_tree(
            "versions/a",
            first="manifest.json",
            after_first=lambda: half.extend(store.files_below("versions/a")),
        )
        assert half == ["versions/a/adapter/weights", "versions/a/shard"]
        assert store.list("versions") == store.list_started("versions") == []
        store.remove_tree("versions/a", first="manifest.json", after_first=nothing)

    def test_a_shared_file_has_two_names_where_there_are_links(self, store):
        store.make_directory("versions/a")
        with store.new_file("base/shard") as file:
            file.write(b"data")
        store.share("base/shard", "versions/a/shard")
        expected = ["versions/a/shard"] if store.has_links else []
        assert store.files_below("versions") == expected
        store.remove_tree("versions/a", first="", after_first=nothing)
        assert store.read("base/shard") == b"data"

    def test_messages_name_the_place(self, store):
        assert store.where("log/1").endswith("/log/1")
        assert store.where("log/1").startswith(store.where(""))
