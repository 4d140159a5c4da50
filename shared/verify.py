"""Everything that is wrong with a version, or with an exchange; not only the first thing.

Reads all bytes that a version's manifest names and compares them with it; changes nothing. Called by
`weightferry verify` and by tests; `repair` does what can be done without touching a good version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import BinaryIO

from .checkpoint import INDEX_NAME
from .commit_log import LOG_NAME, slot_name
from .digest import read_through, xxh3_128
from .errors import ExchangeError, IntegrityError
from .exchange import LATEST_NAME, Exchange, Version
from .manifest import MANIFEST_NAME, Manifest, TensorEntry
from .pointer import require_log_reaches_pointer
from .ranged_reader import RangedReader
from .tensor_files import TensorSlot, TensorSpec, read_open_header


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it must be, and what to do about it."""

    path: str
    problem: str
    expected: str | None = None
    found: str | None = None
    action: str = "do not serve this version; publish a new one"

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)

    def __str__(self) -> str:
        detail = "" if self.expected is None else f": {self.expected} expected, {self.found} found"
        return f"{self.path}: {self.problem}{detail}; {self.action}"


_REPAIR = "`weightferry verify --repair` mends it"
_RESTORE = "nothing can be committed any more: restore the file, or start a new exchange"


def verify_exchange(exchange: Exchange) -> list[Finding]:
    """Check the log, the pointer and every retained version."""
    try:
        versions = exchange.versions()
    except ExchangeError as error:
        log = exchange.store.where(LOG_NAME)
        return [Finding(path=log, problem=str(error), action=_RESTORE)]
    findings = [*_check_log(exchange), *_check_pointer(exchange)]
    for version in versions:
        findings += verify_version(version)
    return findings


def verify_version(version: Version) -> list[Finding]:
    """Check one version's manifest, files, tensors, index and surplus files."""
    try:
        manifest = version.manifest
    except IntegrityError as error:
        return [_finding(error)]
    except ExchangeError as error:
        where = version.store.where(f"{version.dir}/{MANIFEST_NAME}")
        return [Finding(path=where, problem=str(error))]
    findings = list(_check_origin(version, manifest))
    findings += _check_files(version, manifest)
    findings += _check_tensors(version, manifest)
    findings += _check_index(version, manifest)
    return findings + list(_check_surplus(version, manifest))


def _finding(error: IntegrityError) -> Finding:
    expected = None if error.expected is None else str(error.expected)
    return Finding(
        path=error.path, problem=error.problem, expected=expected, found=expected and str(error.found)
    )


def _check_log(exchange: Exchange) -> Iterator[Finding]:
    log = exchange.store.where(LOG_NAME)
    named = [name for name in exchange.store.list(LOG_NAME) if name.endswith(".json")]
    if len(named) != len(exchange.log.entries):
        known = f"entries 1 to {len(exchange.log.entries)}"
        found = f"{len(named)} files"
        yield Finding(path=log, problem="has a gap", expected=known, found=found, action=_RESTORE)
    epoch = 0
    for entry in exchange.log.entries:
        expected = epoch + (entry.kind == "epoch")
        if entry.epoch != expected:
            yield Finding(
                path=exchange.store.where(f"{LOG_NAME}/{slot_name(entry.number)}"),
                problem="has a stale epoch",
                expected=str(expected),
                found=str(entry.epoch),
                action="another program wrote it; do not trust versions from here on",
            )
        epoch = max(epoch, entry.epoch)


def _check_pointer(exchange: Exchange) -> Iterator[Finding]:
    newest = exchange.log.versions[-1].number if exchange.log.versions else 0
    where = exchange.store.where(LATEST_NAME)
    try:
        pointer = exchange.newest_number()
    except ExchangeError as error:
        yield Finding(path=where, problem=str(error), action=_REPAIR)
        return
    try:
        require_log_reaches_pointer(exchange)
    except IntegrityError as error:
        yield replace(_finding(error), action=error.action)
        return
    if pointer != newest:
        problem = "does not name the newest version of the log"
        action = f"the next writer or {_REPAIR}"
        yield Finding(path=where, problem=problem, expected=str(newest), found=str(pointer), action=action)


def _check_origin(version: Version, manifest: Manifest) -> Iterator[Finding]:
    where = version.store.where(f"{version.dir}/{MANIFEST_NAME}")
    for field in ("run_id", "epoch", "step"):
        expected, found = getattr(version.entry, field), getattr(manifest, field)
        if expected != found:
            problem = f"has another {field} than its log entry"
            yield Finding(path=where, problem=problem, expected=str(expected), found=str(found))


def _check_files(version: Version, manifest: Manifest) -> Iterator[Finding]:
    store = version.store
    for entry in manifest.files:
        where = store.where(entry.path)
        if version.leads_out(entry.path):
            yield Finding(path=where, problem="leads out of the exchange")
            continue
        try:
            with store.open(entry.path) as file:
                entry.check(read_through(file, entry.digest), where)
        except FileNotFoundError:
            yield Finding(path=where, problem="is missing")
        except IntegrityError as error:
            yield _finding(error)
        except OSError as error:
            yield Finding(path=where, problem=f"cannot be read ({error})")


def _check_tensors(version: Version, manifest: Manifest) -> Iterator[Finding]:
    by_file: dict[str, list[TensorEntry]] = {}
    for entry in manifest.tensors:
        by_file.setdefault(entry.file, []).append(entry)
    for path, entries in sorted(by_file.items()):
        size_bytes = version.store.size(path)
        if size_bytes is None or version.leads_out(path):
            continue  # already a finding of _check_files
        where = version.store.where(path)
        try:
            with version.store.open(path) as file:
                yield from _compare_tensors(file, where, size_bytes, entries)
        except IntegrityError as error:
            yield _finding(error)
        except OSError as error:
            yield Finding(path=where, problem=f"cannot be read ({error})")


def _compare_tensors(
    file: BinaryIO | RangedReader, where: str, size_bytes: int, entries: list[TensorEntry]
) -> Iterator[Finding]:
    slots = read_open_header(file, size_bytes, where)
    named = {entry.name for entry in entries}
    for name in sorted(slots.keys() - named):
        yield Finding(path=where, problem=f"holds {name}, which the manifest does not place there")
    for entry in entries:
        yield from _compare_tensor(file, where, slots.get(entry.name), entry)


def _compare_tensor(
    file: BinaryIO | RangedReader, where: str, slot: TensorSlot | None, entry: TensorEntry
) -> Iterator[Finding]:
    spec = TensorSpec(name=entry.name, dtype=entry.dtype, shape=entry.shape)
    if slot is None:
        yield Finding(path=where, problem=f"lacks {entry.name}")
    elif slot.spec != spec:
        problem = f"{entry.name} is not what the manifest says"
        yield Finding(path=where, problem=problem, expected=str(spec), found=str(slot.spec))
    else:
        file.seek(slot.begin)
        digest = xxh3_128(file.read(slot.end - slot.begin))
        if digest != entry.xxh3_128:
            problem = f"{entry.name} has other bytes"
            yield Finding(path=where, problem=problem, expected=entry.xxh3_128, found=digest)


def _check_index(version: Version, manifest: Manifest) -> Iterator[Finding]:
    path = f"{version.dir}/{INDEX_NAME}"
    data = version.store.read(path) if manifest.tensors else None
    if data is None:
        return
    where = version.store.where(path)
    try:
        weight_map = dict(json.loads(data)["weight_map"])
    except (ValueError, KeyError, TypeError):
        yield Finding(path=where, problem="is not a safetensors index")
        return
    expected = {entry.name: entry.file.rpartition("/")[2] for entry in manifest.tensors}
    for name in sorted(expected.keys() | weight_map.keys()):
        if weight_map.get(name) != expected.get(name):
            yield Finding(
                path=where,
                problem=f"misplaces {name}",
                expected=str(expected.get(name, "no entry")),
                found=str(weight_map.get(name, "no entry")),
            )


def _check_surplus(version: Version, manifest: Manifest) -> Iterator[Finding]:
    named = {entry.path for entry in manifest.files} | {f"{version.dir}/{MANIFEST_NAME}"}
    for path in version.store.files_below(version.dir):
        if path not in named:
            where = version.store.where(path)
            action = "somebody put it there: remove it, or publish a new version"
            yield Finding(path=where, problem="is not named by the manifest", action=action)
