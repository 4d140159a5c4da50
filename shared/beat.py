"""A small file rewritten at an interval, so that others can see that its owner lives.

A beat proves life only to somebody who watches it change by their own clock; times inside it are for
people. Losing the beat never endangers data: fencing is the log's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import durable
from .digest import canonical_json

BEATS_PER_TTL = 3


class Beat:
    """Rewrites `path` with `content(count)` three times a ttl until closed.

    A failed rewrite (full disk, lost mount) is kept in `last_error` and tried again at the next beat.
    """

    def __init__(self, path: Path, content: Callable[[int], dict[str, Any]], ttl_s: float) -> None:
        self.path, self._content, self._interval_s = path, content, ttl_s / BEATS_PER_TTL
        self.last_error: OSError | None = None
        self._count = 0
        self._stop = threading.Event()
        durable.replace(path, canonical_json(content(0)))
        self._thread = threading.Thread(target=self._run, name=f"beat {path.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop beating; the file stays as it is."""
        self._stop.set()
        self._thread.join(timeout=self._interval_s + 10)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._count += 1
            try:
                durable.replace(self.path, canonical_json(self._content(self._count)), sync=False)
                self.last_error = None
            except OSError as error:
                self.last_error = error
