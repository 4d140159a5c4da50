"""Large objects on their way into a bucket: written once, front to back, digested in the same pass.

Invariant: the object appears when the `with` block ends well, and never otherwise: an exception aborts the
upload. `MultipartUpload` sends parts of an S3 object at the same time; `BufferedUpload` is fsspec's own way
for stores without such calls. Memory: at most `PARTS_AT_ONCE + 1` parts. Called by `object_store`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

from .digest import FileDigest

Buffer = bytes | bytearray | memoryview
ErrorsOf = Callable[[], AbstractContextManager[None]]

PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
PART_DEADLINE_S = 600.0


class MultipartUpload:
    """An S3 object in parts, some of them in flight while the next one is filled."""

    def __init__(self, file_system: Any, key: str, errors_of: ErrorsOf, *, sha256: bool) -> None:
        self._fs, self._key, self._errors_of = file_system, key, errors_of
        self._bucket, _, self._name = key.partition("/")
        self.digest = FileDigest(with_sha256=sha256)
        self._part = bytearray()
        self._upload_id = ""
        self._in_flight: deque[Future] = deque()
        self._parts: list[dict[str, Any]] = []
        self._num_started = 0

    def __enter__(self) -> MultipartUpload:
        self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="upload part")
        return self

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self.digest.update(view)
        while len(view):
            room = PART_BYTES - len(self._part)
            self._part += view[:room]
            view = view[room:]
            if len(self._part) == PART_BYTES:
                self._start_part()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_done = False
        try:
            if kind is None:
                with self._errors_of():
                    self._finish()
                is_done = True
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            if not is_done:
                self._abort()

    def _start_part(self) -> None:
        with self._errors_of():
            if not self._upload_id:
                answer = self._fs.call_s3("create_multipart_upload", Bucket=self._bucket, Key=self._name)
                self._upload_id = answer["UploadId"]
            while len(self._in_flight) >= PARTS_AT_ONCE:
                self._collect()
        self._num_started += 1
        self._in_flight.append(self._pool.submit(self._send, self._num_started, bytes(self._part)))
        self._part.clear()

    def _send(self, number: int, data: bytes) -> dict[str, Any]:
        answer = self._fs.call_s3(
            "upload_part",
            Bucket=self._bucket,
            Key=self._name,
            UploadId=self._upload_id,
            PartNumber=number,
            Body=data,
        )
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def _collect(self) -> None:
        self._parts.append(self._in_flight.popleft().result(timeout=PART_DEADLINE_S))

    def _finish(self) -> None:
        if not self._upload_id:
            self._fs.pipe_file(self._key, bytes(self._part))
            return
        if self._part:
            self._start_part()
        while self._in_flight:
            self._collect()
        self._fs.call_s3(
            "complete_multipart_upload",
            Bucket=self._bucket,
            Key=self._name,
            UploadId=self._upload_id,
            MultipartUpload={"Parts": self._parts},
        )

    def _abort(self) -> None:
        if self._upload_id:
            with suppress(Exception):  # what cannot be aborted now goes with the next sweep
                self._fs.call_s3(
                    "abort_multipart_upload", Bucket=self._bucket, Key=self._name, UploadId=self._upload_id
                )


class BufferedUpload:
    """An object through fsspec's own buffered file."""

    def __init__(self, file_system: Any, key: str, errors_of: ErrorsOf, *, sha256: bool) -> None:
        self._fs, self._key, self._errors_of = file_system, key, errors_of
        self.digest = FileDigest(with_sha256=sha256)

    def __enter__(self) -> BufferedUpload:
        with self._errors_of():
            self._file = self._fs.open(self._key, "wb", block_size=PART_BYTES, autocommit=False)
        return self

    def write(self, data: Buffer) -> None:
        self.digest.update(data)
        with self._errors_of():
            self._file.write(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            with self._errors_of():
                self._file.close()
                self._file.commit()
            return
        with suppress(Exception):
            self._file.discard()
        with suppress(Exception):  # a store that shows files before their commit shows it no more
            self._fs.rm_file(self._key)
