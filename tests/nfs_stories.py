"""What the two clients of the real NFS server do; each story is one function a role.

Started inside the guest as `nfs_stories.py STORY ROLE PLACE OUT`. A role's return value is its report; if it
raises, there is none, and the test fails. The roles meet through files in OUT, which is not on NFS.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tiny_exchange import make_base, publish, writing

from weightferry.shared.errors import VersionNotFoundError, WriterActiveError, WriterFencedError
from weightferry.shared.exchange import Exchange
from weightferry.shared.verify import verify_exchange, verify_version
from weightferry.shared.writer import ExchangeWriter

DEADLINE_S = 120.0
NUM_VERSIONS = 40
TTL_S = 2.0
Report = dict[str, Any]


class Stage:
    """A client's place on NFS, and the signs that the roles give each other."""

    def __init__(self, place: Path, out: Path) -> None:
        self.place, self.out = place, out
        self.exchange_path = place / "exchange"

    def say(self, sign: str, words: str = "") -> None:
        (self.out / f"{sign}.sign").write_text(words)

    def await_sign(self, sign: str) -> str:
        wait_until((self.out / f"{sign}.sign").exists, f"the sign {sign}")
        return (self.out / f"{sign}.sign").read_text()

    def create(self) -> Exchange:
        """The exchange, and the base that it is of, which lies on NFS too."""
        return Exchange.open(self.exchange_path, base=make_base(self.place / "base"))

    def join(self) -> Exchange:
        return Exchange.open(self.exchange_path, base=self.place / "base")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {DEADLINE_S:.0f} s")
        time.sleep(0.02)


def contract_a(stage: Stage) -> Report:
    """The store contract, and the exchange's own tests, with their directories on NFS."""
    tests = Path(__file__).parent
    chosen = [f"{tests}/test_store_local.py::TestLocalStore", f"{tests}/test_exchange.py"]
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={stage.place}/pytest",
        f"--rootdir={tests}", "-c", os.devnull, *chosen,
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    return {"passed": run.returncode == 0, "tail": run.stdout[-3000:]}


def contract_b(_stage: Stage) -> Report:
    return {}


def reading_a(stage: Stage) -> Report:
    """Publish as fast as it goes, keeping two versions."""
    exchange = stage.create()
    writer = ExchangeWriter.become(exchange, run_id="run-a", keep=2, grace_s=0.0)
    stage.say("there")
    stage.await_sign("b-found-nothing")
    for step in range(NUM_VERSIONS):
        publish(writer, step)
        time.sleep(0.05)
    newest = exchange.newest_number()
    stage.say("newest", str(newest))
    stage.await_sign("done")
    writer.close()
    return {"newest": newest, "left": len(exchange.versions())}


def reading_b(stage: Stage) -> Report:
    """Read whatever is newest, whole, under a lease, until the last version was read."""
    stage.await_sign("there")
    exchange = Exchange.open(stage.exchange_path)
    seen: list[int] = []
    problems: list[str] = []
    delays_s: list[float] = []
    assert exchange.newest_number() == 0  # this client's kernel now remembers that the pointer is not there
    stage.say("b-found-nothing")
    newest = stage.out / "newest.sign"
    wait_until(
        lambda: (
            _read_newest(exchange, seen, problems, delays_s)
            and newest.exists()
            and seen[-1:] == [int(newest.read_text())]
        ),
        "the last version",
    )
    stage.say("done")
    return {"seen": seen, "problems": problems, "delays_s": delays_s}


def _read_newest(exchange: Exchange, seen: list[int], problems: list[str], delays_s: list[float]) -> bool:
    """Read the newest version if it is a new one; always True."""
    number = exchange.newest_number()
    if number and number not in seen[-1:]:
        # passed by retention before the lease stood: said so, and a newer one is there
        with suppress(VersionNotFoundError), exchange.open_version(number, reader="b:1") as version:
            delays_s.append(_age_s(version.entry.created))
            time.sleep(0.05)
            problems += [str(finding) for finding in verify_version(version)]
            seen.append(number)
    return True


def _age_s(created: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()


def takeover_a(stage: Stage) -> Report:
    """A writer that is killed in a publish, then one that is put to sleep and wakes up fenced."""
    exchange = stage.create()
    with writing(exchange, ttl_s=TTL_S) as writer:
        first = publish(writer, 1).number
    base = str(stage.place / "base")
    environment = os.environ | {"WEIGHTFERRY_TEST_KILL_AT": "before-commit"}
    command = [
        sys.executable,
        str(Path(__file__).with_name("tiny_exchange.py")),
        str(stage.exchange_path),
        base,
    ]
    killed = subprocess.run([*command, "2"], env=environment)
    assert killed.returncode == -signal.SIGKILL, killed
    writer = ExchangeWriter.become(exchange, run_id="run-zombie", writer_ttl_s=TTL_S)
    publication = writer.begin(3)
    stage.say("a-lives", str(first))
    stage.await_sign("b-was-refused")
    writer._beat.close()  # from here on this process is as good as asleep
    stage.say("a-sleeps")
    stage.await_sign("b-reigns")
    try:
        publish(writer, 4)
        return {"fenced": ""}
    except WriterFencedError as error:
        with suppress(Exception):
            publication.abandon()
        return {"fenced": str(error)}


def takeover_b(stage: Stage) -> Report:
    """Refused by name while the other writer lives, and the one writer after it has gone to sleep."""
    first = int(stage.await_sign("a-lives"))
    exchange = stage.join()
    refused = ""
    try:
        ExchangeWriter.become(exchange, run_id="run-b", writer_ttl_s=TTL_S)
    except WriterActiveError as error:
        refused = str(error)
    stage.say("b-was-refused")
    stage.await_sign("a-sleeps")
    with writing(exchange, run_id="run-b", ttl_s=TTL_S) as writer:
        stage.say("b-reigns")
        last = publish(writer, 5).number
        swept = list(writer.sweep_report)
    time.sleep(0.5)  # the zombie's try, if it does not come to nothing, would show now
    numbers = [version.number for version in exchange.versions()]
    findings = [str(finding) for finding in verify_exchange(exchange)]
    return {"refused": refused, "numbers": numbers, "is": [first, last], "swept": swept, "findings": findings}


def full_a(stage: Stage) -> Report:
    """Publish into a full server, which says so at fsync only, and again when there is room."""
    exchange = stage.create()
    with writing(exchange) as writer:
        first = publish(writer, 1).number
        filler = stage.place / "filler"
        _fill(filler)
        try:
            publish(writer, 2)
            error = ""
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        whole = not verify_version(exchange.version(first))
        after_failure = [version.number for version in exchange.versions()]
        filler.unlink()
        again = publish(writer, 3).number
    stage.say("full-is-over", str(again))
    return {"error": error, "whole": whole, "after_failure": after_failure, "again": again, "first": first}


def full_b(stage: Stage) -> Report:
    again = int(stage.await_sign("full-is-over"))
    exchange = Exchange.open(stage.exchange_path)
    newest = exchange.newest_number()
    findings = [str(finding) for finding in verify_version(exchange.version(newest))]
    return {"newest_is_again": newest == again, "findings": findings}


def _fill(path: Path) -> None:
    """Until not one more byte fits; only fsync tells, or else the close, which NFS then fails."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1 << 9):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)
                    os.fsync(file.fileno())


def main() -> None:
    story, role, place, out = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    report = globals()[f"{story}_{role}"](Stage(place, out))
    part = out / f"{role}.part"
    part.write_text(json.dumps(report))
    shutil.move(part, out / f"{role}.json")


if __name__ == "__main__":
    main()
