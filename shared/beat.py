"""A small file rewritten at an interval, so that others can see that its owner lives.

A beat proves life only to somebody who watches it change by their own clock; times inside it are for
people. Losing the beat never endangers data: fencing is the log's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from .digest import canonical_json
from .store import Store

BEATS_PER_TTL = 3
_LOG = logging.getLogger(__name__)


class Beat:
    """Rewrites the file `path` of a store with `content(count)` three times a ttl until closed.

    A failed rewrite (full disk, lost mount) is logged, kept in `last_error`, and tried again at the next.
    """

    def __init__(
        self, store: Store, path: str, content: Callable[[int], dict[str, Any]], ttl_s: float
    ) -> None:
        self._store, self._path, self._content = store, path, content
        self._interval_s = ttl_s / BEATS_PER_TTL
        self.last_error: OSError | None = None
        self._count = 0
        self._stop = threading.Event()
        store.replace(path, canonical_json(content(0)))
        self._thread = threading.Thread(target=self._run, name=f"beat {path}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop beating; the file stays as it is."""
        self._stop.set()
        self._thread.join(timeout=self._interval_s + 10)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._count += 1
            try:
                self._store.replace(self._path, canonical_json(self._content(self._count)), sync=False)
                self.last_error = None
            except OSError as error:
                if self.last_error is None:
                    where = self._store.where(self._path)
                    _LOG.warning(
                        "%s cannot be rewritten, so others may think its owner dead: %s", where, error
                    )
                self.last_error = error
