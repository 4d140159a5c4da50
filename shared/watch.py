"""Waiting for a new version: `latest.json` is read each interval, and file events only cut the wait short.

Invariant: whatever the events do (never come, come twice, flood, die), a new version is seen within the
interval, and reads are never closer than `MIN_GAP_S`. On network file systems and in buckets events do not
tell what other hosts did, so there the interval alone counts. Called by the rollout server's watcher.
Follows docs/format.md [7]; measured with watchdog 7.1: a handler that raises once kills its observer, and a
watched directory that was removed and made again is silent for good.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import ExchangeError
from .exchange import LATEST_NAME, Exchange

INTERVAL_S = 0.5
BUCKET_INTERVAL_S = 2.0  # at most 2,400 GETs an hour and server, with the jitter below
JITTER = 0.25  # of the interval; always shorter, so that the interval is a bound
MIN_GAP_S = 0.05
MAX_BACKOFF = 8  # intervals between reads while reading fails
REVIVE_AFTER_S = 30.0
NETWORK_FILE_SYSTEMS = {
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "prl_fs", "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs",
}  # fmt: skip
_LOG = logging.getLogger(__name__)


class Watch:
    """Waits for versions of one exchange. A context manager, or `close` it.

    `mechanism` says in words how it learns of a new version; it is logged at the start, too. Either call
    `wait_for_change`, or look by yourself: then `on_event` is called from another thread whenever a look is
    worth while, and `pause_s` is how long to rest otherwise.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        interval_s: float | None = None,
        on_event: Callable[[], None] = lambda: None,
        start_observer: Callable[[Path, Callable[[], None]], Any] | None = None,
    ) -> None:
        self._exchange, self._on_event = exchange, on_event
        is_bucket = exchange.store.path is None
        self.interval_s = interval_s or (BUCKET_INTERVAL_S if is_bucket else INTERVAL_S)
        self._start_observer = start_observer or start_inotify
        self._wake, self._closed = threading.Event(), False
        self._observer: Any = None
        self._tried_at = self._read_at = -REVIVE_AFTER_S
        self._num_failures = 0
        self.mechanism = self._begin()
        _LOG.info("%s: %s", exchange.store.where(LATEST_NAME), self.mechanism)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def close(self) -> None:
        """End a wait in another thread at once, and all later ones."""
        self._closed = True
        self._wake.set()
        if self._observer is not None:
            self._observer.stop()

    def wait_for_change(self, known: int, deadline_s: float) -> int:
        """The newest version's number as soon as it is above `known`; `known` after `deadline_s` seconds.

        If not one read succeeded until the deadline, the last one's error is raised.
        """
        deadline, error, has_read = time.monotonic() + deadline_s, None, False
        while not self._closed:
            try:
                number = self._read()
                has_read, self._num_failures = True, 0
                if number > known:
                    return number
            except (OSError, ExchangeError) as failed:
                error, self._num_failures = failed, self._num_failures + 1
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self._wake.wait(min(left_s, self.pause_s(self._num_failures)))
            self._wake.clear()
        if error is not None and not has_read and not self._closed:
            raise error
        return known

    def _read(self) -> int:
        too_soon_s = self._read_at + MIN_GAP_S - time.monotonic()
        if too_soon_s > 0:
            time.sleep(too_soon_s)
        self._read_at = time.monotonic()
        return self._exchange.newest_number()

    def pause_s(self, num_failures: int) -> float:
        """Seconds until the next look, after so many looks in a row that failed; keeps the observer alive."""
        self._keep_observer_alive()
        interval_s = self.interval_s * min(2**num_failures, MAX_BACKOFF)
        return interval_s * (1 - JITTER * random.random())

    def _begin(self) -> str:
        """Start what file events there are; returns the mechanism in words."""
        path, reading = self._exchange.store.path, f"read every {self.interval_s:g} s"
        if path is None:
            return f"{reading} (a bucket has no file events)"
        if is_network_file_system(kind := file_system_of(path)):
            return f"{reading} (on {kind}, where file events do not tell what other hosts did)"
        try:
            self._observe(path)
        except (OSError, ImportError) as error:
            return f"{reading} (file events are not to be had: {error})"
        return f"{reading}, sooner at file events ({kind})"

    def _observe(self, path: Path) -> None:
        self._tried_at = time.monotonic()
        self._observer = self._start_observer(path, self._notice)

    def _notice(self) -> None:
        self._wake.set()
        self._on_event()

    def _keep_observer_alive(self) -> None:
        """A dead observer costs latency only; a new one is tried now and then."""
        if self._observer is None or self._observer.is_alive() or self._exchange.store.path is None:
            return
        if time.monotonic() - self._tried_at < REVIVE_AFTER_S:
            return
        _LOG.warning("the observer of file events died; %s is still read", LATEST_NAME)
        try:
            self._observe(self._exchange.store.path)
        except (OSError, ImportError) as error:
            _LOG.warning("no new observer of file events: %s", error)


def start_inotify(path: Path, on_change: Callable[[], None]) -> Any:
    """A running watchdog observer that calls `on_change` when `latest.json` of a directory was replaced.

    Only moves count, as the file is only ever replaced by rename; the handler opens nothing, or else its
    own opening would be the next event.
    """
    from watchdog.events import FileMovedEvent, FileSystemEvent, FileSystemEventHandler
    from watchdog.observers import Observer

    class OnReplaced(FileSystemEventHandler):
        def on_moved(self, event: FileSystemEvent) -> None:
            if str(event.dest_path).rpartition("/")[2] == LATEST_NAME:
                on_change()

    observer = Observer()
    observer.schedule(OnReplaced(), str(path), recursive=False, event_filter=[FileMovedEvent])
    observer.start()
    return observer


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that holds a path, "unknown" if it cannot be told; proc(5), mounts."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(errors="replace")
        except OSError:
            return "unknown"
    real, best, kind = path.resolve(), -1, "unknown"
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].encode("ascii", "replace").decode("unicode_escape")  # a space is written \040
        if (
            real.is_relative_to(point) and len(point) >= best
        ):  # the last mount over a point is the visible one
            best, kind = len(point), fields[2]
    return kind


def is_network_file_system(kind: str) -> bool:
    """FUSE counts as one: what lies behind it cannot be told, and costs latency only."""
    return kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")
