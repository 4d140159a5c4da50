"""A large object read front to back in ranges, some of them fetched ahead at the same time.

A single stream from an object store is slow; a few at once fill the line. Memory: `RANGES_AHEAD + 1` ranges.
Called by `object_store`; a file-like object for what reads files of an exchange: read, seek, tell.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from .digest import READ_BLOCK_BYTES

RANGE_BYTES = READ_BLOCK_BYTES  # a reader that asks for blocks of this size is given them uncopied
RANGES_AHEAD = 3
RANGE_DEADLINE_S = 600.0


class RangedReader(io.RawIOBase):
    """`fetch(begin, end)` gets bytes of an object of `size_bytes`; a short answer is an error of fetch's."""

    def __init__(self, fetch: Callable[[int, int], bytes], size_bytes: int) -> None:
        self._fetch, self._size = fetch, size_bytes
        self._position = 0
        self._ahead: deque[tuple[int, Future[bytes]]] = deque()
        self._begin, self._range = 0, b""
        self._pool: ThreadPoolExecutor | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """So many bytes, fewer only at the end."""
        end = self._size if size < 0 else min(self._position + size, self._size)
        parts = []
        while self._position < end:
            part = self._range_at(self._position)[self._position - self._begin : end - self._begin]
            parts.append(part)
            self._position += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _range_at(self, position: int) -> bytes:
        """The range that holds a position; the ones after it are on their way when this returns."""
        if not self._begin <= position < self._begin + len(self._range):
            self._begin = position - position % RANGE_BYTES
            while self._ahead and self._ahead[0][0] != self._begin:
                self._ahead.popleft()[1].cancel()
            self._fill(self._begin)
            self._range = self._ahead.popleft()[1].result(RANGE_DEADLINE_S)
        return self._range

    def _fill(self, begin: int) -> None:
        """Have the range at `begin` and the ones after it in flight."""
        self._pool = self._pool or ThreadPoolExecutor(RANGES_AHEAD + 1, thread_name_prefix="fetch range")
        next_begin = self._ahead[-1][0] + RANGE_BYTES if self._ahead else begin
        last = min(begin + RANGES_AHEAD * RANGE_BYTES, self._size - 1)
        for start in range(next_begin, last + 1, RANGE_BYTES):
            end = min(start + RANGE_BYTES, self._size)
            self._ahead.append((start, self._pool.submit(self._fetch, start, end)))
