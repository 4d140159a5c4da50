"""What stays and what goes: format.md [7], from the pure plan to the commands."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiny_exchange import make_base, publish, writing

from weightferry.shared.command import main
from weightferry.shared.commit_log import Retention
from weightferry.shared.errors import ConfigError, IntegrityError, VersionNotFoundError
from weightferry.shared.exchange import Exchange, Version
from weightferry.shared.pins import pin, unpin
from weightferry.shared.retention import Pruner, RetentionPolicy, plan_retention
from weightferry.shared.verify import verify_exchange
from weightferry.shared.writer import ExchangeWriter


class HandClock:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def exchange(tmp_path):
    return Exchange.open(tmp_path / "exchange", base=make_base(tmp_path / "base"))


@pytest.fixture
def five(exchange) -> list[Version]:
    """Five versions, of steps 10 to 50."""
    with writing(exchange) as writer:
        return [publish(writer, step) for step in (10, 20, 30, 40, 50)]


def steps_of(exchange: Exchange) -> list[int]:
    return [version.step for version in Exchange.open(exchange.path).versions()]


def directories(exchange: Exchange) -> set[str]:
    return {path.name for path in (exchange.path / "versions").iterdir()}


PLANS = [
    ({}, (), None),
    ({"keep": 5}, (), None),
    ({"keep": 2}, (), Retention(watermark=5, kept=())),
    ({"keep": 2, "keep_every": 20}, (), Retention(watermark=5, kept=(3,))),
    ({"keep": 1}, (2, 4), Retention(watermark=6, kept=(2, 4))),
    ({"keep": 4}, (2,), None),
]


@pytest.mark.parametrize(("policy", "pinned", "expected"), PLANS)
def test_the_plan_keeps_the_newest_the_multiples_and_the_pinned(policy, pinned, expected):
    versions = [(2, 10), (3, 20), (4, 30), (5, 40), (6, 50)]
    assert plan_retention(versions, RetentionPolicy(**policy), pinned) == expected


@pytest.mark.parametrize("policy", [{"keep": 0}, {"keep_every": 10}, {"keep": 2, "keep_every": 0}])
def test_a_policy_that_makes_no_sense_is_refused(policy):
    with pytest.raises(ConfigError, match="keep"):
        RetentionPolicy(**policy)


def test_by_default_nothing_is_ever_deleted(exchange, five):
    assert steps_of(exchange) == [10, 20, 30, 40, 50]
    assert len(directories(exchange)) == 5


def test_a_writer_with_keep_leaves_the_last_ones_and_the_multiples(exchange):
    writer = ExchangeWriter.become(exchange, run_id="r", keep=2, keep_every=30, grace_s=0)
    versions = [publish(writer, step) for step in (10, 20, 30, 40, 50)]
    writer.close()
    assert steps_of(exchange) == [30, 40, 50]
    assert directories(exchange) == {version.path.name for version in versions[2:]}
    assert [version.number for version in versions] == [2, 3, 4, 5, 6], "pruning takes no number of its own"
    assert verify_exchange(Exchange.open(exchange.path)) == []


def test_the_grace_passes_between_giving_up_and_deleting(exchange, five):
    clock = HandClock()
    pruner = Pruner(exchange, RetentionPolicy(keep=1), grace_s=5, clock=clock)
    pruner.give_up()
    assert steps_of(exchange) == [50]
    assert pruner.advance().removed == ()
    clock.now += 4.9
    assert [held.reason for held in pruner.advance().held] == ["in its grace of 5 s"] * 4
    clock.now += 0.2
    assert pruner.advance().removed == tuple(version.number for version in five[:4])
    assert directories(exchange) == {five[4].path.name}


def test_a_leased_version_is_never_deleted_and_goes_when_given_back(exchange, five):
    pruner = Pruner(exchange, RetentionPolicy(keep=1), grace_s=0)
    reader = Exchange.open(exchange.path)
    with reader.open_version(five[0].number, reader="host:7") as version:
        pruner.give_up()
        report = pruner.advance()
        assert report.removed == tuple(version.number for version in five[1:4])
        assert "leased by host-7" in report.held[0].reason
        assert version.manifest.step == 10
        assert (version.path / "layer-00000.safetensors").exists()
    assert pruner.advance().removed == (five[0].number,)


def test_a_version_passed_between_the_look_and_the_lease_is_given_back(exchange, five):
    reader = Exchange.open(exchange.path)
    assert reader.version(five[0].number).step == 10
    Pruner(exchange, RetentionPolicy(keep=1)).give_up()
    with (
        pytest.raises(VersionNotFoundError, match="retention has passed it"),
        reader.open_version(five[0].number, reader="r"),
    ):
        pass
    assert list((exchange.path / "readers").iterdir()) == []


def test_the_lease_is_written_before_the_log_is_read(exchange, five, monkeypatch):
    """The pruner gives the version up in the very moment after the reader's look at the log."""
    reader = Exchange.open(exchange.path)
    real_replace, pruner = reader.store.replace, Pruner(exchange, RetentionPolicy(keep=1), grace_s=0)

    def replace(path, data, **options):
        pruner.give_up()
        pruner.advance()
        real_replace(path, data, **options)

    monkeypatch.setattr(reader.store, "replace", replace)
    with (
        pytest.raises(VersionNotFoundError, match="watermark"),
        reader.open_version(five[0].number, reader="r"),
    ):
        pass
    assert list((exchange.path / "readers").iterdir()) == []


def lease_of_elsewhere(exchange: Exchange, number: int, beat: int, name: str = "far") -> None:
    lease = {"format": 1, "reader": name, "numbers": [number], "beat": beat, "ttl_s": 30}
    (exchange.path / "readers" / f"{name}.json").write_text(json.dumps(lease))


def test_a_lease_counts_while_its_beat_moves_by_the_pruners_own_clock(exchange, five):
    clock = HandClock()
    pruner = Pruner(exchange, RetentionPolicy(keep=4), grace_s=0, clock=clock)
    pruner.give_up()
    for beat in range(4):
        lease_of_elsewhere(exchange, five[0].number, beat)
        assert pruner.advance().removed == ()
        clock.now += 29
    lease_of_elsewhere(exchange, five[0].number, 3)
    clock.now += 1.5
    assert pruner.advance().removed == (five[0].number,)
    assert list((exchange.path / "readers").iterdir()) == []


def test_a_damaged_lease_holds_everything_until_it_has_stood_still(exchange, five):
    clock = HandClock()
    pruner = Pruner(exchange, RetentionPolicy(keep=1), grace_s=0, clock=clock)
    (exchange.path / "readers" / "torn.json").write_text("{")
    pruner.give_up()
    assert len(pruner.advance().held) == 4
    clock.now += 31
    assert len(pruner.advance().removed) == 4


def test_the_lease_of_a_killed_process_of_this_host_is_not_waited_for(exchange, five):
    code = (
        "import os, sys; from weightferry.shared.exchange import Exchange\n"
        "with Exchange.open(sys.argv[1]).open_version(int(sys.argv[2]), reader='r'): os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(exchange.path), str(five[0].number)]
    assert subprocess.run(command, timeout=60, check=False).returncode == -9
    assert len(list((exchange.path / "readers").iterdir())) == 1
    pruner = Pruner(exchange, RetentionPolicy(keep=1), grace_s=0)
    pruner.give_up()
    assert len(pruner.advance().removed) == 4


def test_a_pinned_version_stays_until_it_is_unpinned(exchange, five):
    assert pin(exchange, five[0].number)
    assert not pin(exchange, five[0].number)
    pruner = Pruner(Exchange.open(exchange.path), RetentionPolicy(keep=1), grace_s=0)
    pruner.give_up()
    pruner.advance()
    assert steps_of(exchange) == [10, 50]
    assert unpin(exchange, five[0].number)
    assert not unpin(exchange, five[0].number)
    pruner.give_up()
    pruner.advance()
    assert steps_of(exchange) == [50]


def test_a_pin_that_comes_too_late_is_refused(exchange, five):
    late = Exchange.open(exchange.path)
    late.versions()
    Pruner(exchange, RetentionPolicy(keep=1)).give_up()
    with pytest.raises(VersionNotFoundError, match=r"retention has passed it.; it has 6"):
        pin(late, five[0].number)


def test_what_was_given_up_once_stays_given_up(exchange, five):
    Pruner(exchange, RetentionPolicy(keep=1)).give_up()
    generous = Pruner(Exchange.open(exchange.path), RetentionPolicy(keep=4))
    generous.give_up()
    assert steps_of(exchange) == [50]


@pytest.mark.parametrize(
    "point", ["prune-given-up", "prune-before-delete", "prune-mid-delete", "prune-after-delete"]
)
def test_a_pruner_killed_at_any_point_leaves_work_that_the_next_one_finishes(exchange, five, point):
    code = (
        "import sys; from weightferry.shared.command import main\n"
        "sys.exit(main(['gc', sys.argv[1], '--keep', '2', '--grace-s', '0']))"
    )
    environment = {"WEIGHTFERRY_TEST_KILL_AT": point, "PATH": ""}
    command = [sys.executable, "-c", code, str(exchange.path)]
    killed = subprocess.run(command, env=environment, timeout=60, check=False, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    assert steps_of(exchange) == [40, 50]
    assert verify_exchange(Exchange.open(exchange.path)) == []
    assert main(["gc", str(exchange.path), "--grace-s", "0"]) == 0
    assert len(directories(exchange)) == 2


def test_a_failed_deletion_does_not_undo_the_commit(exchange, monkeypatch, caplog):
    writer = ExchangeWriter.become(exchange, run_id="r", keep=1, grace_s=0)
    publish(writer, 1)

    def refuse(*_arguments, **_options):
        raise PermissionError(13, "not yours")

    with monkeypatch.context() as patch:
        patch.setattr(exchange.store, "remove_tree", refuse)
        version = publish(writer, 2)
    assert isinstance(writer.prune_error, PermissionError)
    assert "not yours" in caplog.text
    publish(writer, 3)
    writer.close()
    assert writer.prune_error is None
    assert (version.step, steps_of(exchange), len(directories(exchange))) == (2, [3], 1)


def test_a_directory_deleted_by_hand_is_an_error_that_names_it(exchange, five):
    import shutil

    shutil.rmtree(five[4].path)
    version = Exchange.open(exchange.path).latest()
    assert version is not None
    with pytest.raises(IntegrityError, match=r"manifest\.json: is missing"):
        _ = version.manifest


def test_gc_says_before_what_it_would_do_and_then_does_it(exchange, five, capsys):
    url = str(exchange.path)
    orphan = exchange.path / "versions" / "step00000099-e0000-abcdef"
    orphan.mkdir()
    assert main(["pin", url, str(five[1].number), "--json"]) == 0
    capsys.readouterr()
    expected = {
        "removed": [five[0].number, five[2].number],
        "held": [],
        "swept": [orphan.name],
    }
    assert main(["gc", url, "--keep", "2", "--dry-run", "--json"]) == 0
    foreseen = json.loads(capsys.readouterr().out)
    assert foreseen == expected | {"dry_run": True, "retained": [version.number for version in five]}
    assert len(directories(exchange)) == 6
    assert main(["gc", url, "--keep", "2", "--grace-s", "0.1", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done == expected | {"dry_run": False, "retained": [five[i].number for i in (1, 3, 4)]}
    assert main(["unpin", url, str(five[1].number)]) == 0
    assert "is not pinned (now)" in capsys.readouterr().out


def test_gc_ends_in_time_when_a_reader_holds_on_and_names_it(exchange, five, capsys):
    with Exchange.open(exchange.path).open_version(five[0].number, reader="slow"):
        assert main(["gc", str(exchange.path), "--keep", "4", "--grace-s", "0", "--wait-s", "0.2"]) == 0
    assert "version 2 waits: leased by slow" in capsys.readouterr().out
