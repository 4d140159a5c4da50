"""Watching: polling is the truth, events only wake up (format.md [7], field case 6)."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path

import fsspec
import pytest
from tiny_exchange import make_base, publish, writing

from weightferry.shared import watch as watching
from weightferry.shared.errors import FormatError
from weightferry.shared.exchange import Exchange
from weightferry.shared.watch import Watch, file_system_of, is_network_file_system

INTERVAL_S = 0.3
SLACK_S = 1.0


@pytest.fixture
def exchange(tmp_path):
    return Exchange.open(tmp_path / "exchange", base=make_base(tmp_path / "base"))


class Observer:
    """Stands for watchdog's; the test decides when it emits and when it dies."""

    def __init__(self, _path=None, on_change=None) -> None:
        self.on_change, self.alive, self.stopped = on_change, True, False

    def is_alive(self) -> bool:
        return self.alive

    def stop(self) -> None:
        self.stopped = True


def in_background(act, after_s: float) -> threading.Timer:
    timer = threading.Timer(after_s, act)
    timer.start()
    return timer


def adopt(watch: Watch, exchange: Exchange, deadline_s: float = 10.0) -> float:
    """Publish while the watch waits; seconds from the commit to the wait's end."""
    committed = []

    def act() -> None:
        publish(writer, 1)
        committed.append(time.monotonic())

    with writing(exchange) as writer:
        known = exchange.newest_number()
        timer = in_background(act, 0.05)
        number = watch.wait_for_change(known, deadline_s)
        seen = time.monotonic()
        timer.join(20)
        assert number == exchange.newest_number() > known
    return seen - committed[0]


def test_an_observer_that_never_emits_costs_no_more_than_the_interval(exchange, caplog):
    caplog.set_level(logging.INFO)
    with Watch(exchange, interval_s=INTERVAL_S, start_observer=Observer) as watch:
        assert adopt(watch, exchange) < INTERVAL_S + SLACK_S
    assert "latest.json: read every 0.3 s, sooner at file events" in caplog.text


def test_a_bucket_is_polled_and_the_log_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    fsspec.filesystem("memory").store.clear()
    exchange = Exchange.open("memory://bucket/watched", base=make_base(tmp_path / "base"))
    # url_to_fs made instances of their own, which share memory's one store
    with Watch(exchange, interval_s=INTERVAL_S) as watch:
        assert adopt(watch, exchange) < INTERVAL_S + SLACK_S
    assert "a bucket has no file events" in caplog.text


def test_a_file_event_wakes_long_before_the_interval(exchange):
    with Watch(exchange, interval_s=60) as watch:
        assert "sooner at file events" in watch.mechanism
        assert adopt(watch, exchange, deadline_s=30) < 2


def test_the_death_of_the_observer_is_survived_and_mended(exchange, monkeypatch):
    made = []

    def start(path, on_change):
        made.append(Observer(path, on_change))
        return made[-1]

    monkeypatch.setattr(watching, "REVIVE_AFTER_S", 0.1)
    with Watch(exchange, interval_s=INTERVAL_S, start_observer=start) as watch:
        made[0].alive = False
        assert adopt(watch, exchange) < INTERVAL_S + SLACK_S
        assert watch.wait_for_change(exchange.newest_number(), 0.5) == exchange.newest_number()
        assert len(made) == 2
        assert made[1].on_change is not None


def test_without_events_to_be_had_it_polls_and_says_why(exchange):
    def no_watches_left(_path, _on_change):
        raise OSError(28, "inotify watch limit reached")

    with Watch(exchange, interval_s=INTERVAL_S, start_observer=no_watches_left) as watch:
        assert "inotify watch limit reached" in watch.mechanism
        assert adopt(watch, exchange) < INTERVAL_S + SLACK_S


def test_a_flood_of_events_does_not_make_a_flood_of_reads(exchange, monkeypatch):
    reads, observers = [], []
    real_read = exchange.newest_number
    monkeypatch.setattr(exchange, "newest_number", lambda: reads.append(1) or real_read())

    def start(path, on_change):
        observers.append(Observer(path, on_change))
        return observers[-1]

    with Watch(exchange, interval_s=30, start_observer=start) as watch:
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                observers[0].on_change()

        thread = threading.Thread(target=flood)
        thread.start()
        assert watch.wait_for_change(0, 0.5) == 0
        stop.set()
        thread.join(10)
    assert len(reads) <= 0.5 / watching.MIN_GAP_S + 2


def test_the_rate_of_reads_is_bounded_and_jittered(exchange):
    watch = Watch(exchange, interval_s=2, start_observer=Observer)
    pauses = [watch.pause_s(0) for _ in range(200)]
    assert 1.5 <= min(pauses) < max(pauses) <= 2
    assert max(watch.pause_s(10) for _ in range(50)) <= 16


def test_an_old_pointer_is_no_change(exchange):
    with writing(exchange) as writer:
        number = publish(writer, 1).number
    with Watch(exchange, interval_s=0.1, start_observer=Observer) as watch:
        assert watch.wait_for_change(0, 5) == number
        exchange.store.replace("latest.json", b'{"format": 1, "number": 1}')
        assert watch.wait_for_change(number, 0.3) == number


def test_an_unreadable_pointer_is_waited_out_and_raised_only_if_it_stays(exchange):
    (exchange.path / "latest.json").write_text("{")
    with Watch(exchange, interval_s=0.05, start_observer=Observer) as watch:
        with pytest.raises(FormatError, match=r"latest\.json"):
            watch.wait_for_change(0, 0.3)
        timer = in_background(
            lambda: (exchange.path / "latest.json").write_text('{"format": 1, "number": 7}'), 0.2
        )
        assert watch.wait_for_change(0, 10) == 7
        timer.join(5)


def test_a_directory_removed_and_made_again_is_found_again(exchange, tmp_path):
    with Watch(exchange, interval_s=INTERVAL_S) as watch:
        shutil.move(exchange.path, tmp_path / "aside")
        assert watch.wait_for_change(0, 0.2) == 0
        shutil.move(tmp_path / "aside", exchange.path)
        assert adopt(watch, exchange) < INTERVAL_S + SLACK_S


def test_closing_ends_a_wait_at_once(exchange):
    watch = Watch(exchange, interval_s=60, start_observer=Observer)
    timer = in_background(watch.close, 0.1)
    start = time.monotonic()
    assert watch.wait_for_change(0, 60) == 0
    assert time.monotonic() - start < 5
    timer.join(5)


MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/export /mnt/share nfs4 rw,vers=4.2 0 0
server:/two\\040words /mnt/two\\040words nfs rw 0 0
tmpfs /mnt/share/local tmpfs rw 0 0
s3fs /mnt/bucket fuse.s3fs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_network"),
    [
        ("/home/x", "ext4", False),
        ("/mnt/share/run-7", "nfs4", True),
        ("/mnt/shared", "ext4", False),
        ("/mnt/share/local/x", "tmpfs", False),
        ("/mnt/two words/x", "nfs", True),
        ("/mnt/bucket/x", "fuse.s3fs", True),
    ],
)
def test_network_file_systems_are_told_by_their_mounts(path, kind, is_network):
    assert file_system_of(Path(path), MOUNTS) == kind
    assert is_network_file_system(kind) == is_network


def test_on_a_network_file_system_events_are_not_relied_upon(exchange, monkeypatch):
    monkeypatch.setattr(watching, "file_system_of", lambda _path: "nfs4")
    with Watch(exchange, interval_s=INTERVAL_S) as watch:
        assert "on nfs4, where file events do not tell" in watch.mechanism
        assert adopt(watch, exchange) < INTERVAL_S + SLACK_S
