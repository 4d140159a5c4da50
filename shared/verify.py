"""Everything that is wrong with a version, or with an exchange; not only the first thing.

Reads all bytes that a version's manifest names and compares them with it; changes nothing. Called by
`weightferry verify` and by tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .checkpoint import INDEX_NAME
from .commit_log import LOG_NAME
from .digest import file_xxh3_128, xxh3_128
from .errors import ExchangeError, IntegrityError
from .exchange import Exchange, Version
from .manifest import MANIFEST_NAME, Manifest, TensorEntry
from .tensor_files import TensorSlot, TensorSpec, read_header


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it must be."""

    path: str
    problem: str
    expected: str | None = None
    found: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)

    def __str__(self) -> str:
        detail = "" if self.expected is None else f": {self.expected} expected, {self.found} found"
        return f"{self.path}: {self.problem}{detail}"


def verify_exchange(exchange: Exchange) -> list[Finding]:
    """Check the log, the pointer and every version."""
    try:
        versions = exchange.versions()
    except ExchangeError as error:
        return [Finding(path=str(exchange.path / LOG_NAME), problem=str(error))]
    findings = list(_check_log(exchange))
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
        return [Finding(path=str(version.path / MANIFEST_NAME), problem=str(error))]
    findings = list(_check_files(version, manifest))
    findings += _check_tensors(version, manifest)
    findings += _check_index(version, manifest)
    return findings + list(_check_surplus(version, manifest))


def _finding(error: IntegrityError) -> Finding:
    expected = None if error.expected is None else str(error.expected)
    return Finding(
        path=error.path, problem=error.problem, expected=expected, found=expected and str(error.found)
    )


def _check_log(exchange: Exchange) -> Iterator[Finding]:
    log = exchange.path / LOG_NAME
    named = sorted(path.name for path in log.glob("*.json"))
    if len(named) != len(exchange.log.entries):
        known = f"entries 1 to {len(exchange.log.entries)}"
        yield Finding(path=str(log), problem="has a gap", expected=known, found=f"{len(named)} files")
    epoch = 0
    for entry in exchange.log.entries:
        lawful = entry.epoch == epoch + (entry.kind == "epoch")
        if not lawful:
            where = str(log / f"{entry.number:012d}.json")
            yield Finding(
                path=where, problem="has a stale epoch", expected=str(epoch), found=str(entry.epoch)
            )
        epoch = max(epoch, entry.epoch)
    newest = exchange.log.versions[-1].number if exchange.log.versions else 0
    if (pointer := exchange.newest_number()) != newest:
        where = str(exchange.path / "latest.json")
        problem = "lags behind the log; the next writer mends it"
        yield Finding(path=where, problem=problem, expected=str(newest), found=str(pointer))


def _check_files(version: Version, manifest: Manifest) -> Iterator[Finding]:
    root = version.exchange_path
    for entry in manifest.files:
        path = root / entry.path
        if not path.resolve().is_relative_to(root.resolve()):
            yield Finding(path=str(path), problem="leads out of the exchange")
        elif not path.is_file():
            yield Finding(path=str(path), problem="is missing")
        elif (size := path.stat().st_size) != entry.size_bytes:
            yield Finding(
                path=str(path),
                problem="has a wrong size in bytes",
                expected=str(entry.size_bytes),
                found=str(size),
            )
        elif (digest := file_xxh3_128(path)) != entry.xxh3_128:
            yield Finding(path=str(path), problem="has other bytes", expected=entry.xxh3_128, found=digest)


def _check_tensors(version: Version, manifest: Manifest) -> Iterator[Finding]:
    by_file: dict[str, list[TensorEntry]] = {}
    for entry in manifest.tensors:
        by_file.setdefault(entry.file, []).append(entry)
    for file, entries in sorted(by_file.items()):
        path = version.exchange_path / file
        if not path.is_file():
            continue  # already a finding of _check_files
        try:
            slots = read_header(path)
        except IntegrityError as error:
            yield _finding(error)
            continue
        yield from _compare_tensors(path, slots, entries)


def _compare_tensors(
    path: Path, slots: dict[str, TensorSlot], entries: list[TensorEntry]
) -> Iterator[Finding]:
    named = {entry.name for entry in entries}
    for name in sorted(slots.keys() - named):
        yield Finding(path=str(path), problem=f"holds {name}, which the manifest does not place there")
    with path.open("rb") as file:
        for entry in entries:
            spec = TensorSpec(name=entry.name, dtype=entry.dtype, shape=entry.shape)
            slot = slots.get(entry.name)
            if slot is None:
                yield Finding(path=str(path), problem=f"lacks {entry.name}")
            elif slot.spec != spec:
                yield Finding(
                    path=str(path),
                    problem=f"{entry.name} is not what the manifest says",
                    expected=str(spec),
                    found=str(slot.spec),
                )
            else:
                file.seek(slot.begin)
                digest = xxh3_128(file.read(slot.end - slot.begin))
                if digest != entry.xxh3_128:
                    problem = f"{entry.name} has other bytes"
                    yield Finding(path=str(path), problem=problem, expected=entry.xxh3_128, found=digest)


def _check_index(version: Version, manifest: Manifest) -> Iterator[Finding]:
    path = version.path / INDEX_NAME
    if not manifest.tensors or not path.is_file():
        return
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        yield Finding(path=str(path), problem="is not a safetensors index")
        return
    expected = {entry.name: Path(entry.file).name for entry in manifest.tensors}
    for name in sorted(expected.keys() | weight_map.keys()):
        if weight_map.get(name) != expected.get(name):
            yield Finding(
                path=str(path),
                problem=f"misplaces {name}",
                expected=str(expected.get(name, "no entry")),
                found=str(weight_map.get(name, "no entry")),
            )


def _check_surplus(version: Version, manifest: Manifest) -> Iterator[Finding]:
    named = {version.exchange_path / entry.path for entry in manifest.files} | {version.path / MANIFEST_NAME}
    for path in sorted(version.path.rglob("*")):
        if path.is_file() and path not in named:
            yield Finding(path=str(path), problem="is not named by the manifest")
