"""The exchange as a reader sees it: its identity, its versions, and opening one under a lease.

Invariant: what `latest()`, `versions()` and `version()` return is named and retained by the commit log; a
directory that no entry names does not exist here. Called by the server, the commands and the writer.
Follows docs/format.md [1], [3] and [7].
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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
from .signing import CheckingKey, check_signature
from .store import Store, open_store

IDENTITY_NAME = "exchange.json"
LATEST_NAME = "latest.json"
VERSIONS_NAME = "versions"
BASE_NAME = "base"


class Version:
    """One committed version; its manifest is read and checked when it is first asked for."""

    def __init__(self, store: Store, entry: LogEntry, *, signature_key: CheckingKey | None = None) -> None:
        self.store, self.entry, self._signature_key = store, entry, signature_key
        self.number, self.run_id, self.epoch = entry.number, entry.run_id, entry.epoch
        self.step, self.dir, self.manifest_sha256 = entry.step or 0, entry.dir or "", entry.manifest_sha256

    @property
    def exchange_path(self) -> Path:
        return local_path(self.store)

    @property
    def path(self) -> Path:
        """The version's directory; UnsupportedError where there is none (a bucket)."""
        return self.exchange_path / self.dir

    def leads_out(self, path: str) -> bool:
        """Whether a file of the exchange is really elsewhere, by a symbolic link; such are refused."""
        root = self.store.path
        return root is not None and not (root / path).resolve().is_relative_to(root.resolve())

    @cached_property
    def manifest(self) -> Manifest:
        """IntegrityError when it is missing, not the one that the log names, or not signed as required."""
        path = self.store.where(f"{self.dir}/{MANIFEST_NAME}")
        data = self.store.read(f"{self.dir}/{MANIFEST_NAME}")
        if data is None:
            raise IntegrityError(path, "is missing")
        found = manifest_id(data)
        if found != self.manifest_sha256:
            raise IntegrityError(
                path, "is not what the log names", expected=self.manifest_sha256, found=found
            )
        manifest = Manifest.from_bytes(data, path)
        if self._signature_key is not None:
            check_signature(manifest, self._signature_key, path)
        return manifest

    def __repr__(self) -> str:
        return f"Version({self.number}, step {self.step}, run {self.run_id}, {self.store.where(self.dir)})"


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
    """An exchange as a reader sees it; make one with `Exchange.open`."""

    def __init__(self, store: Store, identity: _Identity, signature_key: CheckingKey | None = None) -> None:
        self._signature_key = signature_key
        self.store, self.exchange_id, self.base = store, identity.exchange_id, identity.base
        self.base_dir: Path | None = None
        self.base_digests: dict[str, str] | None = None
        self.log = CommitLog(store)

    @property
    def path(self) -> Path:
        """The exchange's directory; UnsupportedError where there is none (a bucket)."""
        return local_path(self.store)

    @classmethod
    def open(
        cls,
        url: str | Path,
        base: str | Path | None = None,
        *,
        model_name: str | None = None,
        revision: str | None = None,
        require_signature: CheckingKey | None = None,
    ) -> Exchange:
        """Open the exchange at a path or an fsspec URL (`s3://...`); with `base`, create it if absent.

        `base` is the base checkpoint's directory; its identity (one read of all its bytes) must be the
        exchange's. `model_name` and `revision` are recorded as the user names them. With
        `require_signature` (signing.load_checking_key) a manifest that this key did not sign is an error.

        Raises ExchangeNotFoundError, BaseCheckpointError, BaseMismatchError or FormatError.
        """
        store = open_store(url)
        if base is None:
            return cls(store, _read_identity(store), require_signature)
        checkpoint = Checkpoint.open(base)
        found, digests = identify_base(checkpoint, model=model_name, revision=revision)
        if store.read(IDENTITY_NAME) is None:
            _create(store, found)
        exchange = cls(store, _read_identity(store), require_signature)
        exchange.require_base(found)
        exchange.base_dir, exchange.base_digests = checkpoint.path, digests
        return exchange

    def require_base(self, found: BaseIdentity) -> None:
        """Raise BaseMismatchError unless `found` is this exchange's base."""
        if not self.base.is_same_as(found):
            raise BaseMismatchError(
                f"{self.store.where('')} is the exchange of another base: {self.base} expected, {found} "
                "found. Give the base that the exchange was made with, or a new exchange directory."
            )

    def newest_number(self) -> int:
        """What `latest.json` says, 0 for none: one small read, for a poller. A hint, never the truth."""
        data = self.store.read(LATEST_NAME)
        if data is None:
            return 0
        where = self.store.where(LATEST_NAME)
        value = read_json_object(data, where)
        check_format(value, where)
        number = value.get("number")
        if type(number) is not int or number < 0:
            raise FormatError(f"{where} holds no number; `weightferry verify --repair` mends it")
        return number

    def latest(self) -> Version | None:
        """The newest committed version, or None."""
        versions = self.versions()
        return versions[-1] if versions else None

    def versions(self) -> list[Version]:
        """The committed versions that the log retains, oldest first."""
        self.log.absorb()
        key = self._signature_key
        return [Version(self.store, entry, signature_key=key) for entry in self.log.retained]

    def version(self, number: int) -> Version:
        """The version of that number, or VersionNotFoundError naming the ones there are."""
        known = self.versions()
        for version in known:
            if version.number == number:
                return version
        there = f"it has {', '.join(_ranges([v.number for v in known]))}" if known else "it has none yet"
        was = any(entry.number == number for entry in self.log.versions)
        why = " any more (retention has passed it)" if was else ""
        raise VersionNotFoundError(number, f"{self.store.where('')} has no version {number}{why}; {there}")

    def require_retained(self, number: int) -> None:
        """Raise VersionNotFoundError unless the log, as far as it was read, retains that version."""
        if not any(entry.number == number for entry in self.log.retained):
            self.version(number)

    @contextmanager
    def open_version(self, number: int, *, reader: str) -> Iterator[Version]:
        """Hold a lease on a version while reading it; `reader` names the process, e.g. "host:pid".

        VersionNotFoundError if retention has passed it, also between the caller's look and the lease.
        """
        version = self.version(number)
        with Lease(self.store, number, reader, lambda: self._is_retained(number)):
            yield version

    def _is_retained(self, number: int) -> bool:
        self.log.absorb()
        return self.log.retention.keeps(number)


def local_path(store: Store) -> Path:
    if store.path is None:
        raise UnsupportedError(
            f"{store.where('')} is not a directory; `weightferry materialize` copies a version of it to one"
        )
    return store.path


def _ranges(numbers: list[int]) -> list[str]:
    """[3, 4, 5, 9] -> ["3 to 5", "9"]"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]


def _read_identity(store: Store) -> _Identity:
    data = store.read(IDENTITY_NAME)
    if data is None:
        raise ExchangeNotFoundError(
            f"{store.where('')} is not an exchange (it has no {IDENTITY_NAME}); "
            "check the path, or start a trainer with it"
        )
    where = store.where(IDENTITY_NAME)
    value = read_json_object(data, where)
    check_format(value, where)
    try:
        base = BaseIdentity.from_json(value["base"])
        return _Identity(exchange_id=value["exchange_id"], base=base, created=value["created"])
    except (KeyError, FormatError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
        raise FormatError(f"{where} {why}; restore it, or start a new exchange") from None


def _create(store: Store, base: BaseIdentity) -> None:
    """Make the directories and `latest.json` first, `exchange.json` last: it is what makes an exchange."""
    for name in (LOG_NAME, READERS_NAME, BASE_NAME, VERSIONS_NAME):
        store.make_directory(name, group_writes=name == READERS_NAME)
    identity = _Identity(exchange_id=uuid.uuid4().hex, base=base, created=now())
    with suppress(FileExistsError):
        store.create(LATEST_NAME, canonical_json({"format": FORMAT, "number": 0}))
    with suppress(FileExistsError):  # a racing process made it first: its identity counts
        store.create(IDENTITY_NAME, identity.to_bytes())
