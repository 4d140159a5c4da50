"""The one module that makes things durable: exclusive, whole, and never over something that exists."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from weightferry.shared import durable
from weightferry.shared.digest import file_xxh3_128


def test_exactly_one_of_many_racing_creators_wins(tmp_path):
    path, wins = tmp_path / "slot", []
    start = threading.Barrier(8)

    def create(name: str) -> None:
        start.wait()
        try:
            durable.create_exclusive(path, name.encode() * 1000)
            wins.append(name)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create, args=(str(i),)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join(10) for thread in threads]
    assert len(wins) == 1
    assert path.read_bytes() == wins[0].encode() * 1000
    assert os.listdir(tmp_path) == ["slot"]


def test_a_lost_answer_to_our_own_link_is_settled(tmp_path, monkeypatch):
    real_link = os.link

    def link_whose_answer_is_lost(source, target):
        real_link(source, target)
        raise FileExistsError(errno.EEXIST, "exists")

    monkeypatch.setattr(os, "link", link_whose_answer_is_lost)
    durable.create_exclusive(tmp_path / "slot", b"ours")
    assert (tmp_path / "slot").read_bytes() == b"ours"


def test_a_new_file_never_opens_one_that_exists(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError), durable.NewFile(tmp_path / "f") as file:
        file.write(b"new")
    assert (tmp_path / "f").read_bytes() == b"old"


def write_half_and_fail(path):
    with durable.NewFile(path) as file:
        file.write(b"half")
        raise RuntimeError


def test_a_failure_while_writing_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError):
        write_half_and_fail(tmp_path / "f")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_that_shows_only_at_fsync_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"), durable.NewFile(tmp_path / "f") as file:
        file.write(b"data")
    assert os.listdir(tmp_path) == []


def test_the_digest_of_a_new_file_is_that_of_its_bytes(tmp_path):
    with durable.NewFile(tmp_path / "f") as file:
        for block in (b"", b"abc", memoryview(bytes(range(256)) * 70_000)):
            file.write(block)
    assert file.xxh3_128 == file_xxh3_128(tmp_path / "f")
    assert file.size_bytes == (tmp_path / "f").stat().st_size == 3 + 256 * 70_000


def test_a_file_system_without_links_gets_a_copy(tmp_path, monkeypatch):
    def no_links(_source, _target):
        raise OSError(errno.EPERM, "no links here")

    (tmp_path / "source").write_bytes(b"data")
    monkeypatch.setattr(os, "link", no_links)
    durable.link_or_copy(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"data"


def test_a_stale_handle_is_read_again(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"fresh")
    real_open, stale = os.open, [3]

    def open_stale(path, flags, *rest):
        if stale[0] > 0:
            stale[0] -= 1
            raise OSError(errno.ESTALE, "stale")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", open_stale)
    assert durable.read_fresh(tmp_path / "f") == b"fresh"
    assert durable.read_fresh(tmp_path / "absent") is None


def test_links_in_a_tree_are_removed_and_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "keep").write_bytes(b"")
    (tmp_path / "tree" / "folder").mkdir(parents=True)
    (tmp_path / "tree" / "folder" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "alias").symlink_to(tmp_path / "outside")
    durable.remove_tree(tmp_path / "tree")
    durable.remove_tree(tmp_path / "alias")
    durable.remove_tree(tmp_path / "none")
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert os.listdir(tmp_path / "outside") == ["keep"]


def test_a_full_disk_names_the_file_the_place_and_what_to_do(tmp_path, monkeypatch):
    def full(_descriptor, _data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with (
        pytest.raises(OSError, match=r"No space left .* make room .*/f'"),
        durable.NewFile(tmp_path / "f") as file,
    ):
        file.write(b"data")


def test_a_lost_answer_to_a_shared_link_is_settled_and_another_file_is_not_taken(tmp_path):
    (tmp_path / "source").write_bytes(b"data")
    durable.link_or_copy(tmp_path / "source", tmp_path / "target")
    durable.link_or_copy(tmp_path / "source", tmp_path / "target")
    (tmp_path / "other").write_bytes(b"other")
    with pytest.raises(FileExistsError):
        durable.link_or_copy(tmp_path / "source", tmp_path / "other")


def test_a_joint_file_has_its_size_and_head_at_once_and_is_made_once(tmp_path):
    durable.create_joint(tmp_path / "f", b"head", 10)
    assert (tmp_path / "f").read_bytes() == b"head" + bytes(6)
    with pytest.raises(FileExistsError):
        durable.create_joint(tmp_path / "f", b"HEAD", 10)
    assert (tmp_path / "f").read_bytes() == b"head" + bytes(6)


def test_parts_of_a_joint_file_land_where_they_belong_and_are_durable(tmp_path, monkeypatch):
    real_pwrite, real_fsync, synced = os.pwrite, os.fsync, []

    def short_pwrite(descriptor, data, offset):
        return real_pwrite(descriptor, data[:3], offset)

    def fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "pwrite", short_pwrite)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(durable, "WRITE_BLOCK_BYTES", 4)
    path = tmp_path / "f"
    durable.create_joint(path, b"head", 14)
    with durable.FilePart(path) as late:
        late.write_at(9, b"fghij")
    with durable.FilePart(path) as early:
        early.write_at(4, b"abcde")
    assert path.read_bytes() == b"headabcdefghij"
    assert synced == [str(path), str(path)]


def test_a_part_belongs_to_a_file_that_is_there(tmp_path):
    with pytest.raises(FileNotFoundError), durable.FilePart(tmp_path / "none"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_full_disk_under_a_part_is_said_with_the_files_name(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    durable.create_joint(tmp_path / "f", b"head", 10)
    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(OSError, match="make room or mend the disk") as caught,
        durable.FilePart(tmp_path / "f") as part,
    ):
        part.write_at(4, b"abc")
    assert caught.value.filename == str(tmp_path / "f")
