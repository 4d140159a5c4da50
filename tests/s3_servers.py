"""Real S3 servers from Python packages: SeaweedFS and moto, each on ports of its own until the test ends."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import s3fs

KEY, SECRET, BUCKET = "ferry", "ferry-secret", "ferry"
START_DEADLINE_S = 60.0
NAMES = ("seaweedfs", "moto")
_PR_SET_PDEATHSIG = 1


@contextmanager
def s3_server(name: str, folder: Path) -> Iterator[str]:
    """A server with an empty bucket; yields its endpoint, and has the environment point at it."""
    port = _free_port()
    command = _seaweedfs(folder, port) if name == "seaweedfs" else _moto(port)
    endpoint = f"http://127.0.0.1:{port}"
    client = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    before = {name: os.environ.get(name) for name in (*client, "AWS_DEFAULT_REGION")}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, preexec_fn=_die_with_the_parent
        )
    try:
        _wait_until_it_answers(process, endpoint, folder / "server.log")
        os.environ.update(client, AWS_DEFAULT_REGION="us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()  # the endpoint is not part of what it is cached by
        _make_bucket()
        yield endpoint
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        s3fs.S3FileSystem.clear_instance_cache()
        process.kill()  # SeaweedFS takes half a minute to end on SIGTERM
        process.wait(20)


def fresh_url() -> str:
    """A prefix of the bucket that nobody used before."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def _die_with_the_parent() -> None:
    """A test process that is killed outright leaves no server behind (Linux, prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    """SeaweedFS listens on a second port 10,000 above each one for gRPC."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port


def _seaweedfs(folder: Path, port: int) -> list[str]:
    account = {"accessKey": KEY, "secretKey": SECRET}
    identity = {"name": "ferry", "credentials": [account], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    others = ("-master.port", "-volume.port", "-filer.port", "-s3.port.iceberg", "-s3.port.lance")
    return [
        str(Path(sys.executable).with_name("weed")),
        "server",
        *("-dir", str(folder / "data"), "-ip=127.0.0.1", "-filer", "-s3"),
        *(f"{flag}={_free_port()}" for flag in others),
        *(f"-s3.port={port}", f"-s3.config={folder / 's3.json'}"),
        *("-master.volumeSizeLimitMB=64", "-volume.max=0"),
    ]


def _moto(port: int) -> list[str]:
    return [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]


def _wait_until_it_answers(process: subprocess.Popen, endpoint: str, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urlopen(endpoint, timeout=5).close()
            return
        except HTTPError:
            return
        except (URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"{endpoint} did not answer; it says: {log.read_text()[-2000:]}")


def _make_bucket() -> None:
    file_system = s3fs.S3FileSystem(skip_instance_cache=True)
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            file_system.call_s3("create_bucket", Bucket=BUCKET)
            return
        except OSError:  # SeaweedFS answers before its filer is there
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
