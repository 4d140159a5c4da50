"""One exchange under chaos, with what a model of it knows: what was committed, what is leased, what is true.

A `World` lives for some rounds; after each of them `check` says which promise was broken. Its writers and
readers are those of the product, with silent beats, and a clock of its own where the product takes one.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from audit import audit
from faults import SilentBeat
from tiny_exchange import make_base, publish

from weightferry.shared.errors import IntegrityError, WeightferryError
from weightferry.shared.exchange import Exchange, Version
from weightferry.shared.lease import Lease
from weightferry.shared.retention import Pruner, RetentionPolicy
from weightferry.shared.verify import verify_version
from weightferry.shared.writer import ExchangeWriter

CHILD_DEADLINE_S = 20.0
REFUSED, BROKE = 3, 4


class Broken(Exception):
    """A promise was broken; the message says which."""


class HandClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """`truth` holds the bytes of every file of every version, as they were when it was committed."""

    folder: Path
    random: random.Random
    committed: list[int] = field(default_factory=list)
    truth: dict[int, dict[str, bytes]] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    clock: HandClock = field(default_factory=HandClock)
    step: int = 0

    def __post_init__(self) -> None:
        self.base = make_base(self.folder / "base")
        self.url = str(self.folder / "exchange")
        self.publish()

    def open(self) -> Exchange:
        return Exchange.open(self.url, base=self.base)

    def become(self, run_id: str = "run", **settings) -> ExchangeWriter:
        return ExchangeWriter.become(self.open(), run_id=run_id, writer_ttl_s=0, **settings)

    def publish(self, run_id: str = "run", **settings) -> Version:
        writer = self.become(run_id, **settings)
        version = publish(writer, self.next_step())
        writer.close()
        return self.enter(version)

    def next_step(self) -> int:
        self.step += 1
        return self.step

    def enter(self, version: Version) -> Version:
        """A commit was acknowledged."""
        self.committed.append(version.number)
        self.truth[version.number] = {
            str(path.relative_to(version.path)): path.read_bytes()
            for path in version.path.rglob("*")
            if path.is_file()
        }
        return version

    def newest(self) -> Version:
        version = Exchange.open(self.url).latest()
        if version is None:
            raise Broken("LOST there is no version any more")
        return version

    def lease(self) -> Lease:
        """A reader takes the newest version and holds it for some rounds."""
        exchange, number = Exchange.open(self.url), self.newest().number
        lease = Lease(
            exchange.store, number, f"reader-{number}", lambda: exchange.version(number) is not None
        )
        self.leases[number] = lease.__enter__()
        return lease

    def pass_ttl(self, pruner: Pruner) -> None:
        """Let so much time go by that only the leases of the living count."""
        for _ in range(2):
            pruner.advance()
            self.clock.now += 31
            for beat in [beat for beat in SilentBeat.living if beat.path in self._live_paths()]:
                beat.beat()
        pruner.advance()

    def _live_paths(self) -> set[str]:
        return {lease.path for lease in self.leases.values()}

    def give_back(self, number: int) -> None:
        self.leases.pop(number).__exit__(None, None, None)

    def pruner(self, keep: int = 2, grace_s: float = 0) -> Pruner:
        return Pruner(self.open(), RetentionPolicy(keep=keep), grace_s=grace_s, clock=self.clock)

    def copy(self) -> Path:
        """The exchange as it is, for damaging."""
        target = self.folder / f"copy-{self.random.randrange(1 << 40):010x}"
        shutil.copytree(self.url, target)
        return target

    def check(self) -> None:
        """Raise Broken if something is torn, lost, or deleted in spite of a lease."""
        if broken := audit(self.url, self.committed):
            kind = "TORN" if any(line.startswith("TORN") for line in broken) else "LOST"
            raise Broken(f"{kind} {broken}")
        exchange = Exchange.open(self.url)
        exchange.log.absorb()
        for number in self.leases:
            entry = next(entry for entry in exchange.log.versions if entry.number == number)
            if problems := verify_version(Version(exchange.store, entry)):
                raise Broken(f"LEASED version {number} was deleted or torn: {problems}")
        for version in exchange.versions():
            if version.number not in self.truth:  # committed by a process that died before it could say so
                self.enter(version)
            elif version.manifest.to_bytes() != self.truth[version.number]["manifest.json"]:
                raise Broken(f"TORN version {version.number} is another than was committed")

    def in_child(self, act: Callable[[], object]) -> tuple[str, str]:
        """Run something in a forked process: ("killed" | "done" | "refused", message)."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            self._be_child(act, writer)
        os.close(writer)
        message = _read_all(reader, pid)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            if os.WTERMSIG(status) != signal.SIGKILL:
                raise Broken(f"TORN a process died of signal {os.WTERMSIG(status)}")
            return "killed", ""
        if os.WEXITSTATUS(status) == BROKE:
            raise Broken(message)
        return ("refused" if os.WEXITSTATUS(status) == REFUSED else "done"), message

    def _be_child(self, act: Callable[[], object], pipe: int) -> None:
        code, message = 0, ""
        try:
            act()
        except (WeightferryError, OSError) as error:
            code, message = REFUSED, f"{type(error).__name__}: {error}"
        except BaseException as error:
            code, message = BROKE, f"UNEXPECTED {type(error).__name__}: {error}"
        os.write(pipe, message.encode()[:4000])
        os._exit(code)


def _read_all(descriptor: int, pid: int) -> str:
    deadline, data = time.monotonic() + CHILD_DEADLINE_S, b""
    os.set_blocking(descriptor, False)
    while time.monotonic() < deadline:
        try:
            block = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            time.sleep(0.001)
            continue
        if not block:
            os.close(descriptor)
            return data.decode()
        data += block
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise Broken(f"HANG a process did not end within {CHILD_DEADLINE_S:g} s")


def check_message(message: str) -> None:
    """An error must name the file, what was expected and found where that applies, and the next action."""
    names_file = re.search(r"/\S+\.(json|safetensors)|/exchange|/copy-|/\.tmp-", message)
    has_action = re.search(
        r"; [a-z`]|: make room|try again|publish|open another|restore|check the|stop", message
    )
    compares = re.search(r"size|bytes|disagree|has another", message)
    if not names_file or not has_action:
        raise Broken(f"MESSAGE names no file or no next action: {message}")
    if compares and "expected" not in message and "No space" not in message and "quota" not in message:
        raise Broken(f"MESSAGE does not say what was expected and found: {message}")


def refusal(act: Callable[[], object]) -> str:
    """The message with which something is refused, checked; "" if it is not refused."""
    try:
        act()
    except IntegrityError as error:
        check_message(str(error))
        return error.problem
    except (WeightferryError, OSError) as error:
        check_message(str(error))
        return type(error).__name__
    return ""
