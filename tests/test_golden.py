"""The bytes of every file of format 1, and that they are still read (docs/format.md [1] to [7])."""

from __future__ import annotations

import shutil

from golden_story import GOLDEN, KEY, files_of, golden_exchange

from weightferry.shared.exchange import Exchange
from weightferry.shared.verify import verify_exchange


def test_every_file_is_written_with_its_golden_bytes(tmp_path):
    with golden_exchange(tmp_path) as path:
        found = files_of(path)
    golden = files_of(GOLDEN)
    assert sorted(found) == sorted(golden)
    assert [name for name in golden if found[name] != golden[name]] == []


def test_every_kind_of_file_is_among_the_golden_ones():
    names = files_of(GOLDEN)
    for part in ("exchange.json", "latest.json", "writer.json", "readers/", "base/", "manifest.json"):
        assert any(name.startswith(part) or name.endswith(part) for name in names), part
    log = b"".join(data for name, data in names.items() if name.startswith("log/"))
    for kind in ("epoch", "version", "pin", "unpin", "retention"):
        assert f'"kind": "{kind}"'.encode() in log
    assert all(
        data.endswith(b"}\n")
        for name, data in names.items()
        if name.endswith("json") and "config" not in name
    )


def test_the_golden_exchange_is_read_and_is_whole(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "exchange")
    exchange = Exchange.open(tmp_path / "exchange", require_signature=KEY)
    assert verify_exchange(exchange) == []
    assert [(version.number, version.step) for version in exchange.versions()] == [(2, 10), (4, 30)]
    assert exchange.log.pinned == {2}
    assert exchange.newest_number() == 4
    assert exchange.base.model == "org/tiny"
