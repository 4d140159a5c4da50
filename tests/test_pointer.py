"""`latest.json` may lag, and heals; nobody who slept leaves it behind the log (format.md [5] 6)."""

from __future__ import annotations

import json
import shutil

import pytest
from tiny_exchange import make_base, publish, writing

from weightferry.shared.command import main
from weightferry.shared.errors import FormatError, IntegrityError
from weightferry.shared.exchange import Exchange
from weightferry.shared.pointer import mend_pointer
from weightferry.shared.verify import verify_exchange
from weightferry.shared.writer import ExchangeWriter


@pytest.fixture
def exchange(tmp_path):
    return Exchange.open(tmp_path / "exchange", base=make_base(tmp_path / "base"))


def test_a_writer_that_slept_between_commit_and_pointer_does_not_turn_it_back(exchange, monkeypatch):
    successor = Exchange.open(exchange.path, base=exchange.base_dir)
    real_replace = exchange.store.replace
    with writing(exchange, run_id="sleeper") as sleeper:
        sleeper.close()  # its successor believes it gone

        def replace_after_a_sleep(path, data, **options):
            if path == "latest.json":
                monkeypatch.undo()
                with writing(successor, run_id="successor") as writer:
                    publish(writer, 2)
            real_replace(path, data, **options)

        monkeypatch.setattr(exchange.store, "replace", replace_after_a_sleep)
        first = publish(sleeper, 1)
    newest = Exchange.open(exchange.path).latest()
    assert newest is not None
    assert newest.number > first.number
    assert exchange.newest_number() == newest.number


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{}",
        "[1]",
        '{"format": 1, "number": "x"}',
        '{"format": 1, "number": 0}',
        '{"format": 1, "number": true}',
        '{"format": 1, "number": -5}',
    ],
)
def test_repair_mends_the_pointer_and_touches_no_version(exchange, capsys, damage):
    with writing(exchange) as writer:
        version = publish(writer, 1)
    before = {path: path.stat().st_mtime_ns for path in version.path.rglob("*")}
    (exchange.path / "latest.json").write_text(damage)
    assert main(["verify", str(exchange.path)]) == 1
    assert "verify --repair" in capsys.readouterr().out
    assert main(["verify", str(exchange.path), "--repair"]) == 0
    assert "names 2 again" in capsys.readouterr().out
    assert Exchange.open(exchange.path).newest_number() == version.number
    assert {path: path.stat().st_mtime_ns for path in version.path.rglob("*")} == before


def test_a_pointer_that_is_not_a_number_is_refused_by_a_poller(exchange):
    (exchange.path / "latest.json").write_text('{"format": 1, "number": null}')
    with pytest.raises(FormatError, match="holds no number"):
        exchange.newest_number()


def test_repair_sweeps_what_the_dead_left_and_keeps_bad_versions_for_people(exchange, capsys):
    with writing(exchange) as writer:
        version = publish(writer, 1)
    (exchange.path / "versions" / "step00000009-e0000-abcdef").mkdir()
    (version.path / "config.json").unlink()
    assert main(["verify", str(exchange.path), "--repair", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["repairs"] == ["step00000009-e0000-abcdef, left by a dead writer, was removed"]
    assert [finding["problem"] for finding in report["findings"]] == ["is missing"]
    assert version.path.exists()
    assert len(verify_exchange(exchange)) == 1


def test_repair_of_one_version_is_refused(exchange, capsys):
    assert main(["verify", str(exchange.path), "2", "--repair"]) == 2
    assert "never a version" in capsys.readouterr().err


def test_a_whole_exchange_needs_no_mending(exchange):
    with writing(exchange) as writer:
        publish(writer, 1)
    assert not mend_pointer(exchange)


def test_a_pointer_beyond_the_log_stops_every_writer_before_numbers_are_used_twice(exchange, capsys):
    with writing(exchange) as writer:
        version = publish(writer, 1)
    shutil.move(exchange.path / "log", exchange.path.parent / "log-aside")
    (exchange.path / "log").mkdir()
    again = Exchange.open(exchange.path, base=exchange.base_dir)
    with pytest.raises(
        IntegrityError, match=r"beyond the last entry .* 0 at most expected, 2 found; restore log/"
    ):
        ExchangeWriter.become(again, run_id="run-b")
    assert main(["verify", str(exchange.path)]) == 1
    assert "restore log/ from a copy" in capsys.readouterr().out
    assert main(["verify", str(exchange.path), "--repair"]) == 1
    assert version.path.exists()
    assert list((exchange.path / "log").iterdir()) == []
    assert again.newest_number() == 2

    (exchange.path / "log").rmdir()
    shutil.move(exchange.path.parent / "log-aside", exchange.path / "log")
    with writing(Exchange.open(exchange.path, base=exchange.base_dir)) as writer:
        assert publish(writer, 2).number == 4


def test_a_directory_in_the_pointers_place_is_named(exchange, capsys):
    with writing(exchange) as writer:
        publish(writer, 1)
    (exchange.path / "latest.json").unlink()
    (exchange.path / "latest.json").mkdir()
    assert main(["verify", str(exchange.path)]) == 1
    assert "latest.json is a directory where a file belongs" in capsys.readouterr().out


def test_a_damaged_identity_is_named(exchange):
    (exchange.path / "exchange.json").write_text('{"format":1,"exchange_id":"3","base":[],"created":"1"}')
    with pytest.raises(FormatError, match=r"exchange\.json is damaged .* restore it, or start a new"):
        Exchange.open(exchange.path)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 1, "run_id": "a", "owner": "o", "epoch": 1, "beat": 1, "ttl_s": "x", "closed": false}',
    ],
)
def test_a_damaged_beat_is_for_a_person_to_judge(exchange, words):
    (exchange.path / "writer.json").write_text(words)
    with pytest.raises(FormatError, match=r"writer\.json .*if no trainer is, delete it"):
        ExchangeWriter.become(exchange, run_id="run-a")
