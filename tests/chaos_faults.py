"""The faults of `make chaos`: each does something bad to a world and returns what came of it, in a few words.

A fault raises `Broken` when the product behaved as it must not; what must hold after every fault alike is
checked by the world. All randomness is the world's own, so that a seed repeats a run.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from chaos_world import Broken, World, check_message, refusal
from faults import Crash, CrashAt, Fault, FullAt, FullAtSync, LostLinks, ShortWrites, posix_calls
from nfs_store import NfsClient
from tiny_exchange import publish

from weightferry.shared.command import main
from weightferry.shared.errors import (
    IntegrityError,
    VersionNotFoundError,
    WeightferryError,
    WriterFencedError,
)
from weightferry.shared.exchange import Exchange, Version
from weightferry.shared.kill_points import VARIABLE
from weightferry.shared.materialize import materialize
from weightferry.shared.verify import verify_exchange

PUBLISH_POINTS = (
    *("after-begin", "after-shard:1", "before-manifest", "after-manifest"),
    *("before-commit", "after-commit", "after-latest"),
)
PRUNE_POINTS = ("prune-given-up", "prune-before-delete", "prune-mid-delete", "prune-after-delete")
MAX_CALLS = 120


class FailAt(Fault):
    """One storage call fails, and only that one."""

    def __init__(self, at: int, error: int) -> None:
        super().__init__()
        self._at, self._error = at, error

    def around(self, name: str, call: Callable, arguments: tuple, options: dict) -> object:
        self.num_calls += 1
        if self.num_calls == self._at:
            paths = [str(argument) for argument in arguments if isinstance(argument, os.PathLike | str)]
            raise OSError(self._error, os.strerror(self._error), *paths[:1])
        return call(*arguments, **options)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_a_publish(world: World) -> str:
    point, before = world.random.choice(PUBLISH_POINTS), world.newest().number
    os.environ[VARIABLE] = point
    try:
        end, message = world.in_child(lambda: world.publish("killed"))
    finally:
        del os.environ[VARIABLE]
    if end != "killed":
        raise Broken(f"UNEXPECTED the writer {end} at {point}: {message}")
    world.step += 1
    is_new = world.newest().number != before
    if is_new != (point in ("after-commit", "after-latest")):
        raise Broken(f"TORN killed at {point}, and there is {'a' if is_new else 'no'} new version")
    return "new version, whole" if is_new else "old version stays"


def kill_at_a_storage_call(world: World) -> str:
    fault = CrashAt(world.random.randint(1, MAX_CALLS), after=world.random.random() < 0.5, die=die)

    def act() -> None:
        with posix_calls(fault):
            world.publish("killed", keep=2, grace_s=0)

    before = world.newest().number
    end, _ = world.in_child(act)
    world.step += 1
    is_new = world.newest().number != before
    return f"{end}: " + ("new version, whole" if is_new else "old version stays")


def fail_a_storage_call(world: World) -> str:
    """The job lives on: it abandons, says why, and publishes again."""
    writer = world.become("failing")
    error = world.random.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
    try:
        with posix_calls(FailAt(world.random.randint(1, 60), error)):
            world.enter(publish(writer, world.next_step()))
        outcome = "unharmed"
    except (OSError, WeightferryError) as failed:
        if "/" not in str(failed):
            raise Broken(f"MESSAGE names no file: {failed}") from failed
        outcome = "refused, and the next one appears"
    newest = world.newest().number
    version = world.enter(publish(writer, world.next_step()))
    writer.close()
    if version.number <= newest:
        raise Broken("LOST a number was used twice")
    return outcome


def fill_the_disk(world: World) -> str:
    """ENOSPC or EDQUOT at byte k of file n, or only at the n-th fsync."""
    writer, error = world.become("full"), world.random.choice([errno.ENOSPC, errno.EDQUOT])
    if world.random.random() < 0.5:
        fault: Fault = FullAt(world.random.randint(1, 6), world.random.randint(0, 300), error)
    else:
        fault = FullAtSync(world.random.randint(1, 12), error)
    before = world.newest().number
    try:
        with posix_calls(fault):
            world.enter(publish(writer, world.next_step()))
        outcome = "there was room enough"
    except OSError as full:
        if full.errno != error:
            raise Broken(f"UNEXPECTED {full}") from full
        check_message(str(full))
        is_new = world.newest().number != before
        outcome = "full: " + ("committed, pointer mended later" if is_new else "old version stays")
    world.enter(publish(writer, world.next_step()))
    writer.close()
    return outcome


def kill_a_pruner(world: World) -> str:
    for _ in range(3):
        world.publish()
    os.environ[VARIABLE] = world.random.choice(PRUNE_POINTS)
    try:
        end, message = world.in_child(lambda: _gc(world))
    finally:
        del os.environ[VARIABLE]
    if end != "killed":
        raise Broken(f"UNEXPECTED the pruner {end}: {message}")
    _prune_all(world)
    return "the next pruner finished"


def kill_a_pruner_at_a_storage_call(world: World) -> str:
    for _ in range(3):
        world.publish()
    fault = CrashAt(world.random.randint(1, 40), after=world.random.random() < 0.5, die=die)

    def act() -> None:
        with posix_calls(fault):
            _gc(world)

    end, _ = world.in_child(act)
    _prune_all(world)
    return f"{end}: the next pruner finished"


def _gc(world: World) -> None:
    pruner = world.pruner()
    pruner.give_up()
    pruner.advance()


def _prune_all(world: World) -> None:
    pruner = world.pruner()
    pruner.give_up()
    world.pass_ttl(pruner)
    waiting = {entry.number for entry in pruner.waiting()}
    if waiting - set(world.leases):
        raise Broken(f"LOST room: versions {waiting} were not deleted")


def kill_a_sweep(world: World) -> str:
    os.environ[VARIABLE] = "after-manifest"
    world.in_child(lambda: world.publish("killed"))
    os.environ[VARIABLE] = "mid-sweep"
    end, message = world.in_child(lambda: world.publish("sweeper"))
    del os.environ[VARIABLE]
    if end != "killed":
        raise Broken(f"UNEXPECTED the sweeper {end}: {message}")
    world.step += 2
    world.publish()
    exchange = Exchange.open(world.url)
    garbage = set(exchange.store.list("versions")) - {
        (entry.dir or "").rpartition("/")[2] for entry in _all_versions(exchange)
    }
    if garbage:
        raise Broken(f"LOST room: {garbage} was not swept")
    return "the next writer swept"


def _all_versions(exchange: Exchange) -> list:
    exchange.log.absorb()
    return exchange.log.versions


def two_writers(world: World) -> str:
    """Each believes the other one dead; they publish in random order."""
    first, second = world.become("first"), world.become("second")
    outcomes = []
    for _ in range(3):
        writer = world.random.choice([first, second])
        try:
            world.enter(publish(writer, world.next_step()))
            outcomes.append(writer is second)
        except WriterFencedError as error:
            check_message(str(error))
            outcomes.append(writer is first)
    second.close()
    if not all(outcomes):
        raise Broken("LOST the older writer committed, or the newer one could not")
    return "the older one is fenced by name"


def prune_under_a_reader(world: World) -> str:
    world.lease()
    for _ in range(world.random.randint(1, 4)):
        world.publish("pruning", keep=1, grace_s=0)
    world.check()
    outcome = "leased version stays"
    if world.random.random() < 0.7:
        for number in list(world.leases):
            world.give_back(number)
        _prune_all(world)
        outcome = "stays, then goes"
    return outcome


def a_reader_asleep(world: World) -> str:
    """Its beat stands still for longer than its ttl; it wakes up in the middle of a pruned version."""
    exchange, number = Exchange.open(world.url), world.newest().number
    with exchange.open_version(number, reader="sleeper") as version:
        manifest = version.manifest
        for _ in range(2):
            world.publish()
        pruner = world.pruner(keep=1)
        pruner.give_up()
        if number in pruner.advance().removed:
            raise Broken("LEASED version was deleted while its lease was fresh")
        world.pass_ttl(pruner)
        said = refusal(lambda: materialize(version, world.folder / f"wake-{number}"))
        if said and (world.folder / f"wake-{number}").exists():
            raise Broken("TORN a copy of a deleted version appeared")
        shutil.rmtree(world.folder / f"wake-{number}", ignore_errors=True)
        return f"deleted; the reader is told ({said})" if said else f"read whole ({manifest.published})"


def a_killed_reader(world: World) -> str:
    number = world.newest().number

    def act() -> None:
        with Exchange.open(world.url).open_version(number, reader="killed"):
            die()

    world.in_child(act)
    world.publish()
    if number in world.leases:
        return "another reader holds it"
    pruner = world.pruner(keep=1)
    pruner.give_up()
    pruner.advance()  # no time goes by
    if any(entry.number == number for entry in pruner.waiting()):
        raise Broken("LOST room: the lease of a dead process of this host still holds")
    return "its lease does not count"


def damage(world: World) -> str:
    """A copy of the exchange is damaged; whoever reads must notice, and no wrong byte may come out."""
    copy = world.copy()
    try:
        exchange = Exchange.open(copy)
        version = world.random.choice(exchange.versions())
        kind = world.random.choice([*DAMAGES])
        DAMAGES[kind](world, version)
        findings = verify_exchange(Exchange.open(copy))
        if not findings:
            raise Broken(f"TORN verify does not see: {kind}")
        for finding in findings:
            check_message(str(finding))
        return f"{kind}: {_read_damaged(world, copy, version.number)}"
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.rmtree(f"{copy}-out", ignore_errors=True)


def _read_damaged(world: World, copy: Path, number: int) -> str:
    out = Path(f"{copy}-out")
    if said := refusal(lambda: materialize(Exchange.open(copy).version(number), out)):
        if out.exists():
            raise Broken("TORN a damaged version appeared")
        return "refused"
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    if found != world.truth[number]:
        raise Broken(f"TORN wrong bytes were handed out {said}")
    return "not in what is read"


def _any_file(world: World, version: Version) -> Path:
    files = sorted(path for path in version.path.rglob("*") if path.is_file())
    return world.random.choice(files)


def _rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def flip(world: World, version: Version) -> None:
    path = _any_file(world, version)
    data = bytearray(path.read_bytes())
    data[world.random.randrange(len(data))] ^= 1 << world.random.randrange(8)
    _rewrite(path, bytes(data))


def cut(world: World, version: Version) -> None:
    path = _any_file(world, version)
    _rewrite(path, path.read_bytes()[: world.random.randrange(path.stat().st_size)])


def lengthen(world: World, version: Version) -> None:
    path = _any_file(world, version)
    _rewrite(path, path.read_bytes() + world.random.randbytes(world.random.randint(1, 9)))


def tear(world: World, version: Version) -> None:
    """A page of zeros in the middle, as after a power cut without fsync."""
    path = _any_file(world, version)
    data = bytearray(path.read_bytes())
    start = world.random.randrange(len(data))
    torn = bytes(data[:start]) + bytes(len(data) - start)
    _rewrite(path, torn if torn != data else torn[:-1])


def lose(world: World, version: Version) -> None:
    _any_file(world, version).unlink()


def add(world: World, version: Version) -> None:
    (version.path / "layer-00009.safetensors").write_bytes(world.random.randbytes(20))


def swap(world: World, version: Version) -> None:
    one, two = version.path / "layer-00000.safetensors", version.path / "outer.same.safetensors"
    one_data, two_data = one.read_bytes(), two.read_bytes()
    _rewrite(one, two_data)
    _rewrite(two, one_data)


def swap_versions(world: World, version: Version) -> None:
    """A shard of another version under this one's name: same header, same size, other numbers."""
    path = version.path / "layer-00000.safetensors"
    data = path.read_bytes()
    _rewrite(path, data[:-16] + world.random.randbytes(16))


def link_out(world: World, version: Version) -> None:
    path = version.path / "config.json"
    outside = world.folder / "outside.json"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)


def spoil_the_log(world: World, version: Version) -> None:
    log = version.exchange_path / "log"
    path = world.random.choice(sorted(log.iterdir()))
    data = bytearray(path.read_bytes())
    data[world.random.randrange(len(data))] ^= 1 << world.random.randrange(8)
    if world.random.random() < 0.2 and path != max(log.iterdir()):
        path.unlink()
    else:
        _rewrite(path, bytes(data))


def spoil_the_pointer(world: World, version: Version) -> None:
    words = ["", "{", '{"format": 1}', '{"format": 1, "number": 1}', '{"format": 2, "number": 1}', "[]"]
    (version.exchange_path / "latest.json").write_text(world.random.choice(words))


DAMAGES: dict[str, Callable[[World, Version], None]] = {
    "flipped bit": flip,
    "cut file": cut,
    "lengthened file": lengthen,
    "torn file": tear,
    "missing file": lose,
    "surplus file": add,
    "swapped shards": swap,
    "other numbers": swap_versions,
    "link out": link_out,
    "log entry": spoil_the_log,
    "pointer": spoil_the_pointer,
}


def cut_under_a_reader(world: World) -> str:
    """Truncated or removed while it is being read: an error or the whole, never a signal."""
    copy, number = world.copy(), world.newest().number
    removed = world.random.random() < 0.5

    def act() -> None:
        version = Exchange.open(copy).version(number)
        entry = next(e for e in version.manifest.files if e.path.endswith("layer-00000.safetensors"))
        digest = entry.digest
        with version.store.open(entry.path) as file:
            digest.update(file.read(50 if removed else 0))
            path = version.exchange_path / entry.path
            path.unlink() if removed else os.truncate(path, 60)
            digest.update(file.read())
        entry.check(digest, path)

    try:
        end, message = world.in_child(act)
    finally:
        shutil.rmtree(copy)
    if removed != (end == "done"):
        raise Broken(f"TORN a reader of a cut file {end}: {message}")
    if message:
        check_message(message)
    return "removed: read whole" if removed else "cut: refused"


def stale_caches(world: World) -> str:
    """A reader on NFS that has just seen that the next slot is free."""
    client = NfsClient(os, world.clock)
    with client.mounted():
        reader = Exchange.open(world.url)
        reader.versions()
        if reader.newest_number() != world.newest().number:
            world.publish()
    version = world.publish()
    with client.mounted():
        if reader.newest_number() != version.number or reader.version(version.number).step != version.step:
            raise Broken("LOST a reader on NFS does not see what was committed")
        with reader.open_version(version.number, reader="nfs"):
            pass
    return "seen at once"


def step_the_clock(world: World) -> str:
    """The wall clock jumps by days between publishes; only people read it."""
    when = world.random.choice(["1970-01-01T00:00:00.000+00:00", "2100-01-01T00:00:00.000+00:00"])
    with (
        patch("weightferry.shared.commit_log.now", lambda: when),
        patch("weightferry.shared.publication.now", lambda: when),
        patch("time.time", lambda: world.random.choice([0.0, 4e9])),
    ):
        number = world.newest().number
        version = world.publish("jumping", keep=3, grace_s=0)
    if version.number <= number or world.newest().number != version.number:
        raise Broken("LOST a version by the clock")
    return "makes no difference"


def awkward_calls(world: World) -> str:
    fault = world.random.choice([LostLinks, ShortWrites])
    with posix_calls(fault()):
        world.publish("awkward")
    return f"{fault.__name__}: published"


def no_permission(world: World) -> str:
    """The trainer's user may read the exchange, but not write to it."""
    versions = Path(world.url) / "versions"
    for path in (world.folder, Path(world.url)):
        path.chmod(0o755)
    versions.chmod(0o555)

    def act() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        publish(world.become("stranger"), 1)

    try:
        end, message = world.in_child(act)
    finally:
        versions.chmod(0o755)
    if end != "refused" or "Permission denied" not in message or "/" not in message:
        raise Broken(f"MESSAGE of a writer without permission: {end} {message}")
    return "refused by name"


def spoil_and_repair(world: World) -> str:
    os.environ[VARIABLE] = world.random.choice(["after-manifest", "after-commit"])
    world.in_child(lambda: world.publish("killed"))
    del os.environ[VARIABLE]
    world.step += 1
    spoil_the_pointer(world, world.newest())
    with open(os.devnull, "w") as nowhere, patch("sys.stdout", nowhere):
        main(["verify", world.url, "--repair"])
    if Exchange.open(world.url).newest_number() != world.newest().number:
        raise Broken("LOST the pointer was not mended")
    return "mended"


def crash_in_a_lease(world: World) -> str:
    """A reader dies at any call of opening and giving back; no version may become undeletable or torn."""
    number = world.newest().number
    fault = CrashAt(world.random.randint(1, 16), after=world.random.random() < 0.5)
    try:
        with posix_calls(fault), Exchange.open(world.url).open_version(number, reader="dying") as version:
            _ = version.manifest
    except Crash:
        pass
    except (IntegrityError, VersionNotFoundError) as error:
        raise Broken(f"LOST {error}") from error
    _prune_all(world)
    return "died" if fault.is_dead else "given back"


FAULTS: dict[str, Callable[[World], str]] = {
    "writer killed at a named step": kill_a_publish,
    "writer killed at a storage call": kill_at_a_storage_call,
    "a storage call fails": fail_a_storage_call,
    "disk or quota full": fill_the_disk,
    "pruner killed at a named step": kill_a_pruner,
    "pruner killed at a storage call": kill_a_pruner_at_a_storage_call,
    "sweep killed": kill_a_sweep,
    "two writers": two_writers,
    "pruning under a reader": prune_under_a_reader,
    "reader asleep": a_reader_asleep,
    "reader killed": a_killed_reader,
    "reader dies at a storage call": crash_in_a_lease,
    "damage": damage,
    "file cut or removed under a reader": cut_under_a_reader,
    "stale NFS caches": stale_caches,
    "clock steps": step_the_clock,
    "lost answers, short writes": awkward_calls,
    "no permission": no_permission,
    "killed, pointer spoiled, repaired": spoil_and_repair,
}
