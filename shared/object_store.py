"""An exchange in a bucket: the Store protocol on any fsspec object store, S3 first.

Invariants: an object appears whole or not at all (a failed or killed upload is never completed, and is
aborted by who fails or by the next sweep); slots of the log are made by a conditional put, which is proved on
the server once before it is relied upon; no listing is ever answered from a cache. Unchanged shards are not
linked but named by every manifest. Follows docs/format.md [1] and [5]; fsspec 2026.9, s3fs 2026.9.
"""

from __future__ import annotations

import errno
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .errors import UnsupportedError, WeightferryError
from .ranged_reader import RangedReader
from .upload import BufferedUpload, MultipartUpload

_CREATE_TRIES = 5
_FIRST_PAUSE_S = 0.2
_PROOF = "log/.tmp-proof-"  # hidden from listings; gone again at once


class ObjectStore:
    """A prefix of a bucket. Make one with `open_object_store`; `file_system` is fsspec's."""

    path = None
    has_links = False

    def __init__(self, file_system: Any, root: str, url: str) -> None:
        self._fs, self._root, self._url = file_system, root.rstrip("/"), url.rstrip("/")
        self._creates_exclusively = False
        # s3fs asks for the size first, to fetch large objects in parts; small files need one request only.
        self._one_request = {"max_concurrency": 1} if hasattr(file_system, "call_s3") else {}

    def where(self, path: str) -> str:
        return f"{self._url}/{path}".rstrip("/")

    def read(self, path: str) -> bytes | None:
        with self._errors_of("read", path):
            try:
                return self._fs.cat_file(self._key(path), **self._one_request)
            except FileNotFoundError:
                return None

    def list(self, directory: str) -> list[str]:
        with self._errors_of("list", directory):
            try:
                found = self._fs.ls(self._key(directory), detail=False, refresh=True)
            except FileNotFoundError:
                return []
        names = {key.rstrip("/").removeprefix(self._key(directory)).strip("/") for key in found}
        return sorted(name for name in names if name and not name.startswith(".tmp-"))

    def list_started(self, directory: str) -> list[str]:
        prefix = self._key(directory) + "/"
        uploads = [key for key, _ in self._unfinished(directory)]
        return sorted({*self.list(directory), *(key.removeprefix(prefix).split("/")[0] for key in uploads)})

    def create(self, path: str, data: bytes) -> None:
        self._prove_exclusive_creation()
        self._create(path, data)

    def replace(self, path: str, data: bytes, *, sync: bool = True) -> None:
        with self._errors_of("replace", path):
            self._fs.pipe_file(self._key(path), data)

    def new_file(self, path: str, *, sha256: bool = False) -> MultipartUpload | BufferedUpload:
        kind = MultipartUpload if hasattr(self._fs, "call_s3") else BufferedUpload
        return kind(self._fs, self._key(path), lambda: self._errors_of("write", path), sha256=sha256)

    def share(self, source: str, target: str) -> None:
        """A bucket has no links: manifests name the one object."""

    def seal(self, directories: Iterable[str]) -> None:
        """An object is durable once its upload was acknowledged."""

    def open(self, path: str) -> RangedReader:
        size_bytes, key = self.size(path), self._key(path)
        if size_bytes is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.where(path))

        def fetch(begin: int, end: int) -> bytes:
            with self._errors_of("read", path):
                data = self._fs.cat_file(key, start=begin, end=end)
            if len(data) != end - begin:
                raise OSError(errno.EIO, f"{end - begin} bytes expected, {len(data)} found", self.where(path))
            return data

        return RangedReader(fetch, size_bytes)

    def size(self, path: str) -> int | None:
        with self._errors_of("look at", path):
            self._fs.invalidate_cache()
            try:
                return self._fs.info(self._key(path))["size"]
            except FileNotFoundError:
                return None

    def files_below(self, directory: str) -> list[str]:
        with self._errors_of("list", directory):
            self._fs.invalidate_cache()
            found = self._fs.find(self._key(directory))
        prefix = self._key(directory) + "/"  # some servers list the directory itself as if it were an object
        return sorted(key.removeprefix(f"{self._root}/") for key in found if key.startswith(prefix))

    def make_directory(self, path: str, *, group_writes: bool = False) -> None:
        """Prefixes need no making."""

    def remove(self, path: str) -> None:
        with self._errors_of("remove", path), suppress(FileNotFoundError):
            self._fs.rm_file(self._key(path))

    def remove_tree(
        self, directory: str, *, first: str = "", after_first: Callable[[], None] = lambda: None
    ) -> None:
        if first:
            self.remove(f"{directory}/{first}")
        after_first()
        self._abort_uploads(directory)
        paths = self.files_below(directory)
        for path in paths:
            self.remove(path)
        parents = {path.rpartition("/")[0] for path in paths} | {directory}
        for parent in sorted(parents, reverse=True):
            self._remove_marker(parent)

    def sweep(self, directory: str) -> int:
        """Abort the uploads of objects directly in a directory; nothing unfinished is ever visible."""
        if not directory:
            return 0
        unfinished = [one for one in self._unfinished(directory) if _parent(one[0]) == self._key(directory)]
        for key, upload_id in unfinished:
            self._abort(key, upload_id)
        return len(unfinished)

    def _remove_marker(self, directory: str) -> None:
        """Some servers (SeaweedFS) list an empty directory for a while; deleting `name/` ends that."""
        if hasattr(self._fs, "call_s3"):
            bucket, _, name = self._key(directory).partition("/")
            with self._errors_of("remove", directory), suppress(FileNotFoundError):
                self._fs.call_s3("delete_object", Bucket=bucket, Key=f"{name}/")

    def _key(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _create(self, path: str, data: bytes) -> None:
        """Conditional put; whatever the answer, the object tells whose it is: no two callers' data agree."""
        error: OSError | None = None
        for attempt in range(_CREATE_TRIES):
            if attempt:
                time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                with self._errors_of("create", path):
                    self._fs.pipe_file(self._key(path), data, mode="create")
                return
            except PermissionError:
                raise
            except OSError as failed:  # 412 and 409 have many names; a lost answer may be either
                error = failed
            found = self.read(path)
            if found == data:
                return
            if found is not None:
                raise FileExistsError(errno.EEXIST, "exists", self.where(path)) from error
        raise OSError(
            errno.EIO,
            f"{self.where(path)}: could not be created in {_CREATE_TRIES} tries; check the object store, "
            f"then start again ({error})",
        )

    def _prove_exclusive_creation(self) -> None:
        """Some servers ignore If-None-Match; there two writers would overwrite each other's commits."""
        if self._creates_exclusively:
            return
        proof = f"{_PROOF}{uuid.uuid4().hex}"
        try:
            self._create(proof, b"first")
            self._create(proof, b"second")
        except FileExistsError:
            self._creates_exclusively = True
        finally:
            self.remove(proof)
        if not self._creates_exclusively:
            raise UnsupportedError(
                f"{self._url}: the server ignores conditional puts (If-None-Match: *), so two writers could "
                "overwrite each other; use a server that honours them, or a directory"
            )

    def _unfinished(self, directory: str) -> list[tuple[str, str]]:
        """(key, upload id) of the multipart uploads below a directory that were never completed."""
        if not hasattr(self._fs, "call_s3"):
            return []
        bucket, _, prefix = self._key(directory).partition("/")
        with self._errors_of("list the uploads of", directory):
            answer = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        return [(f"{bucket}/{item['Key']}", item["UploadId"]) for item in answer.get("Uploads") or ()]

    def _abort_uploads(self, directory: str) -> None:
        for key, upload_id in self._unfinished(directory):
            self._abort(key, upload_id)

    def _abort(self, key: str, upload_id: str) -> None:
        bucket, _, name = key.partition("/")
        with self._errors_of("abort an upload of", name), suppress(FileNotFoundError):
            self._fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=name, UploadId=upload_id)

    @contextmanager
    def _errors_of(self, act: str, path: str) -> Iterator[None]:
        """Let callers see OSError alone, whichever client library failed."""
        try:
            yield
        except (OSError, WeightferryError):
            raise
        except Exception as error:
            where = self.where(path)
            raise OSError(errno.EIO, f"could not {act} {where}: {type(error).__name__}: {error}") from error


def _parent(key: str) -> str:
    return key.rpartition("/")[0]


def open_object_store(url: str) -> ObjectStore:
    """The store at an fsspec URL such as `s3://bucket/prefix`; credentials and endpoint are the client's."""
    protocol = url.partition("://")[0]
    try:
        import fsspec
        from fsspec.core import url_to_fs

        fsspec.get_filesystem_class(protocol)
        file_system, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise UnsupportedError(
            f"{url}: the client for {protocol}:// is not installed ({error}); "
            "for S3: pip install 'weightferry[s3]'"
        ) from None
    except ValueError as error:
        raise UnsupportedError(
            f"{url} cannot be an exchange: {error}; give a directory or s3://..."
        ) from None
    if "/" not in root.strip("/"):
        raise UnsupportedError(
            f"{url} names a whole bucket; give a prefix in it, such as {url.rstrip('/')}/run-7"
        )
    return ObjectStore(file_system, root, url)
