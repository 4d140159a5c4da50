"""Reading files through in blocks."""

from __future__ import annotations

import io

import pytest

from weightferry.shared import digest
from weightferry.shared.digest import FileDigest, blocks_of, read_through, xxh3_128

DATA = bytes(range(23))


@pytest.fixture(params=["a local file", "any other"])
def file(request, tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "READ_BLOCK_BYTES", 5)
    if request.param == "any other":
        yield io.BytesIO(DATA)
        return
    (tmp_path / "file").write_bytes(DATA)
    with (tmp_path / "file").open("rb") as opened:
        yield opened


def test_blocks_are_what_is_left_of_the_file(file):
    file.read(2)
    assert [bytes(block) for block in blocks_of(file)] == [DATA[at : at + 5] for at in range(2, 23, 5)]
    assert list(blocks_of(file)) == []


def test_a_file_that_is_read_through_has_the_digest_of_its_bytes(file):
    found = read_through(file, FileDigest(with_sha256=True))
    assert (found.size_bytes, found.xxh3_128) == (len(DATA), xxh3_128(DATA))
