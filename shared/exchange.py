"""The exchange as a reader sees it: its identity, its versions, and opening one under a lease.

Invariant: what `latest()`, `versions()` and `version()` return is named by the commit log; a directory that
no entry names does not exist here. Called by the server, the inspect commands and the writer.
Follows docs/format.md [1], [3] and [7].
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import durable
from .base import BaseIdentity, identify_base
from .checkpoint import Checkpoint
from .commit_log import LOG_NAME, CommitLog, LogEntry, now
from .digest import canonical_json
from .errors import (
    BaseMismatchError,
    ExchangeNotFoundError,
    FormatError,
    IntegrityError,
    UnsupportedError,
    VersionNotFoundError,
)
from .lease import READERS_NAME, Lease
from .manifest import FORMAT, MANIFEST_NAME, Manifest, check_format, manifest_id, read_json_object

IDENTITY_NAME = "exchange.json"
LATEST_NAME = "latest.json"
VERSIONS_NAME = "versions"
BASE_NAME = "base"


class Version:
    """One committed version; its manifest is read and checked when it is first asked for."""

    def __init__(self, exchange_path: Path, entry: LogEntry) -> None:
        self.exchange_path, self.entry = exchange_path, entry
        self.number, self.run_id, self.epoch = entry.number, entry.run_id, entry.epoch
        self.step, self.dir, self.manifest_sha256 = entry.step or 0, entry.dir or "", entry.manifest_sha256
        self.path = exchange_path / self.dir

    @cached_property
    def manifest(self) -> Manifest:
        """Raises IntegrityError when it is missing or not the one that the log names."""
        path = self.path / MANIFEST_NAME
        data = durable.read_fresh(path)
        if data is None:
            raise IntegrityError(path, "is missing")
        found = manifest_id(data)
        if found != self.manifest_sha256:
            raise IntegrityError(
                path, "is not what the log names", expected=self.manifest_sha256, found=found
            )
        return Manifest.from_bytes(data, path)

    def __repr__(self) -> str:
        return f"Version({self.number}, step {self.step}, run {self.run_id}, {self.path})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    exchange_id: str
    base: BaseIdentity
    created: str
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        return canonical_json(
            {
                "format": self.format,
                "exchange_id": self.exchange_id,
                "base": self.base.to_json(),
                "created": self.created,
            }
        )


class Exchange:
    """A local exchange directory; make one with `Exchange.open`."""

    def __init__(self, path: Path, identity: _Identity) -> None:
        self.path, self.exchange_id, self.base = path, identity.exchange_id, identity.base
        self.base_dir: Path | None = None
        self.base_digests: dict[str, str] | None = None
        self.log = CommitLog(path)

    @classmethod
    def open(
        cls,
        url: str | Path,
        base: str | Path | None = None,
        *,
        model_name: str | None = None,
        revision: str | None = None,
    ) -> Exchange:
        """Open the exchange at a local path; with `base`, create it if absent.

        `base` is the base checkpoint's directory; its identity (one read of all its bytes) must be the
        exchange's. `model_name` and `revision` are recorded as the user names them.

        Raises ExchangeNotFoundError, BaseCheckpointError, BaseMismatchError or FormatError.
        """
        path = _local_path(url)
        if base is None:
            return cls(path, _read_identity(path))
        checkpoint = Checkpoint.open(base)
        found, digests = identify_base(checkpoint, model=model_name, revision=revision)
        if not (path / IDENTITY_NAME).exists():
            _create(path, found)
        exchange = cls(path, _read_identity(path))
        exchange.require_base(found)
        exchange.base_dir, exchange.base_digests = checkpoint.path, digests
        return exchange

    def require_base(self, found: BaseIdentity) -> None:
        """Raise BaseMismatchError unless `found` is this exchange's base."""
        if not self.base.is_same_as(found):
            raise BaseMismatchError(
                f"{self.path} is the exchange of another base: {self.base} expected, {found} found. "
                "Give the base that the exchange was made with, or a new exchange directory."
            )

    def newest_number(self) -> int:
        """What `latest.json` says, 0 for none: one small read, for a poller. A hint, never the truth."""
        path = self.path / LATEST_NAME
        data = durable.read_fresh(path)
        if data is None:
            return 0
        value = read_json_object(data, path)
        check_format(value, path)
        return value["number"]

    def latest(self) -> Version | None:
        """The newest committed version, or None."""
        self.log.absorb()
        versions = self.log.versions
        return Version(self.path, versions[-1]) if versions else None

    def versions(self) -> list[Version]:
        """All committed versions that the log names, oldest first."""
        self.log.absorb()
        return [Version(self.path, entry) for entry in self.log.versions]

    def version(self, number: int) -> Version:
        """The version of that number, or VersionNotFoundError naming the ones there are."""
        known = self.versions()
        for version in known:
            if version.number == number:
                return version
        there = f"it has {known[0].number} to {known[-1].number}" if known else "it has none yet"
        raise VersionNotFoundError(number, f"{self.path} has no version {number}; {there}")

    @contextmanager
    def open_version(self, number: int, *, reader: str) -> Iterator[Version]:
        """Hold a lease on a version while reading it; `reader` names the process, e.g. "host:pid"."""
        version = self.version(number)
        with Lease(self.path, number, reader):
            yield version


def _local_path(url: str | Path) -> Path:
    text = str(url)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    elif "://" in text:
        raise UnsupportedError(f"{text}: only local paths are supported as an exchange; give a directory")
    return Path(text).absolute()


def _read_identity(path: Path) -> _Identity:
    file = path / IDENTITY_NAME
    data = durable.read_fresh(file)
    if data is None:
        raise ExchangeNotFoundError(
            f"{path} is not an exchange (it has no {IDENTITY_NAME}); "
            "check the path, or start a trainer with it"
        )
    value = read_json_object(data, file)
    check_format(value, file)
    try:
        base = BaseIdentity.from_json(value["base"])
        return _Identity(exchange_id=value["exchange_id"], base=base, created=value["created"])
    except KeyError as error:
        raise FormatError(f"{file} lacks {error}") from None


def _create(path: Path, base: BaseIdentity) -> None:
    """Make the directories and `latest.json` first, `exchange.json` last: it is what makes an exchange."""
    for name in (LOG_NAME, READERS_NAME, BASE_NAME, VERSIONS_NAME):
        durable.make_directory(path / name)
    identity = _Identity(exchange_id=uuid.uuid4().hex, base=base, created=now())
    with suppress(FileExistsError):
        durable.create_exclusive(path / LATEST_NAME, canonical_json({"format": FORMAT, "number": 0}))
    with suppress(FileExistsError):  # a racing process made it first: its identity counts
        durable.create_exclusive(path / IDENTITY_NAME, identity.to_bytes())
