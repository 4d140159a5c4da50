"""Two servers follow one exchange, each for itself.

The writer keeps one version and gives no grace, so that nothing but a lease protects what a server reads.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import wait_until_gone
from reissue import Reissuer, make_contents, reissuing
from tiny_model import make_tiny_model
from vllm_server import LiveServer, live_server
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from weightferry.shared.exchange import Exchange
from weightferry.shared.lease import READERS_NAME

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["12 + 34 = ", "the policy says: ", "alpha " * 30]
NUM_TRIES = 100


class LeaseEvents(FileSystemEventHandler):
    """Which processes have left leases, and what to do at once when one appears."""

    def __init__(self) -> None:
        self.readers: set[int] = set()
        self.at_lease: Callable[[int], None] = lambda pid: None

    def on_any_event(self, event: FileSystemEvent) -> None:
        name = Path(str(event.dest_path or event.src_path)).name
        if event.event_type in ("created", "moved") and name.endswith(".json"):
            pid = int(name.split("-")[-2])  # HOST-PID-RANDOM.json
            self.readers.add(pid)
            self.at_lease(pid)


@contextmanager
def lease_events(exchange: Path) -> Iterator[LeaseEvents]:
    events, observer = LeaseEvents(), Observer()
    observer.schedule(events, str(exchange / READERS_NAME))
    observer.start()
    try:
        yield events
    finally:
        observer.stop()
        observer.join()


def leases_of(exchange: Path, pid: int) -> list[Path]:
    return [path for path in (exchange / READERS_NAME).glob("*.json") if f"-{pid}-" in path.name]


def stop_while_it_reads(
    server: LiveServer, other: LiveServer, reissuer: Reissuer, events: LeaseEvents
) -> int:
    """Issue versions until the server is stopped with a lease in its hands; the version of that lease."""
    stopped = threading.Event()

    def stop(pid: int) -> None:
        if pid == server.pid and not stopped.is_set():
            os.kill(pid, signal.SIGSTOP)
            stopped.set()

    exchange = reissuer.writer.exchange.path
    for _ in range(NUM_TRIES):
        stopped.clear()
        events.at_lease = stop
        number = reissuer.issue()
        assert stopped.wait(60)
        other.wait_for_version(number)
        if leases_of(exchange, server.pid):
            events.at_lease = lambda pid: None
            return number
        os.kill(server.pid, signal.SIGCONT)  # it was too quick
        server.wait_for_version(number)
    raise AssertionError("the server was never caught with a lease")


def test_each_of_two_servers_adopts_each_version_and_what_either_still_reads_stays(tmp_path):
    base, exchange = make_tiny_model(tmp_path / "base"), tmp_path / "exchange"
    contents = make_contents(tmp_path, base, 3)
    place = (tmp_path, base, exchange, "merged")
    with (
        reissuing(exchange, base, contents, keep=1, grace_s=0.0) as reissuer,
        lease_events(exchange) as events,
        live_server(*place, name="one") as one,
    ):
        with live_server(*place, name="two") as two:
            for _ in range(3):
                check_both_serve(one, two, reissuer.issue())
            assert events.readers == {one.pid, two.pid}

            held = stop_while_it_reads(two, one, reissuer, events)
            try:
                one.wait_for_version(reissuer.issue())
                one.wait_for_version(reissuer.issue())
                version = next(v for v in reissuer.writer.exchange.log.versions if v.number == held)
                assert (exchange / version.dir).exists()
                held_by = {entry.number: entry.reason for entry in reissuer.writer.prune_report.held}
                assert str(two.pid) in held_by[held]
                assert set(held_by) == {held}  # what only the first server had read is gone
            finally:
                os.kill(two.pid, signal.SIGCONT)
            check_both_serve(one, two, reissuer.numbers[-1])
            assert two.status()["refused"] == one.status()["refused"] == []
            check_both_serve(one, two, reissuer.issue())
            assert not (exchange / version.dir).exists()

            wait_until_gone(two.kill(), "the engine outlives its killed API server", 30)
        missed = [reissuer.issue() for _ in range(2)]
        one.wait_for_version(missed[-1])
        with live_server(*place, name="two") as two:
            assert two.status()["active_version"] == missed[-1]  # before it answers anything
            check_both_serve(one, two, missed[-1])
            check_both_serve(one, two, reissuer.issue())
            assert two.status()["refused"] == one.status()["refused"] == []
    assert [v.number for v in Exchange.open(exchange).versions()] == [reissuer.numbers[-1]]


def check_both_serve(one: LiveServer, two: LiveServer, number: int) -> None:
    one.wait_for_version(number)
    two.wait_for_version(number)
    answers = one.ask_greedy(PROMPTS)
    assert answers == two.ask_greedy(PROMPTS)
    assert answers[1] == {number}
