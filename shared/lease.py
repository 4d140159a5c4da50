"""A reader's lease: written before it reads a version, so that retention leaves that version alone.

One file a lease under `readers/`, with a beat; gone when released. After writing it the reader looks at
`retention.json`: a version below the watermark and not named there may be going, so it is given back.
Follows docs/format.md [7].
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from types import TracebackType

from . import durable
from .beat import Beat
from .errors import VersionNotFoundError
from .manifest import FORMAT, check_format, read_json_object

READERS_NAME = "readers"
RETENTION_NAME = "retention.json"
LEASE_TTL_S = 30.0


class Lease:
    """Holds one version of an exchange open for one reader, as a context manager."""

    def __init__(self, exchange_path: Path, number: int, reader: str, ttl_s: float = LEASE_TTL_S) -> None:
        self._exchange_path, self.number, self._ttl_s = exchange_path, number, ttl_s
        self.reader = f"{re.sub(r'[^A-Za-z0-9._-]', '-', reader)}-{uuid.uuid4().hex[:8]}"
        self.path = exchange_path / READERS_NAME / f"{self.reader}.json"

    def __enter__(self) -> Lease:
        self._beat = Beat(self.path, self._content, self._ttl_s)
        if not is_retained(self._exchange_path, self.number):
            self._release()
            raise VersionNotFoundError(
                self.number, f"version {self.number} is below the retention watermark; open a newer one"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        self._beat.close()
        durable.remove_file(self.path)

    def _content(self, beat: int) -> dict[str, object]:
        return {
            "format": FORMAT,
            "reader": self.reader,
            "numbers": [self.number],
            "beat": beat,
            "ttl_s": self._ttl_s,
        }


def is_retained(exchange_path: Path, number: int) -> bool:
    """Whether retention promises to keep a version: at or above the watermark, or named."""
    path = exchange_path / RETENTION_NAME
    data = durable.read_fresh(path)
    if data is None:
        return True
    value = read_json_object(data, path)
    check_format(value, path)
    return number >= value["watermark"] or number in value["kept"]
