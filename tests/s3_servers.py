"""Real S3 servers from Python packages: SeaweedFS and moto, each on ports of its own until the test ends."""

from __future__ import annotations

import ctypes
import json
import os
import random
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
NUM_STARTS = 4
# Below the range from which Linux takes the ports of outgoing connections, also 10,000 higher (gRPC).
PORTS = range(10_240, 22_000)
NAMES = ("seaweedfs", "moto")
_PR_SET_PDEATHSIG = 1


@contextmanager
def s3_server(name: str, folder: Path) -> Iterator[str]:
    """A server with an empty bucket; yields its endpoint, and has the environment point at it."""
    process, endpoint = _start(name, folder)
    client = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    before = {name: os.environ.get(name) for name in (*client, "AWS_DEFAULT_REGION")}
    try:
        os.environ.update(client, AWS_DEFAULT_REGION="us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()  # the endpoint is not part of what it is cached by
        _make_bucket()
        yield endpoint
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        s3fs.S3FileSystem.clear_instance_cache()
        _end(process)


def fresh_url() -> str:
    """A prefix of the bucket that nobody used before."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def _die_with_the_parent() -> None:
    """A test process that is killed outright leaves no server behind (Linux, prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _start(name: str, folder: Path) -> tuple[subprocess.Popen, str]:
    """A server that answers, and its endpoint. Between the choice of a port and its use another process may
    take it: then other ports are tried."""
    tried = []
    for attempt in range(NUM_STARTS):
        place = folder / f"start-{attempt}"
        place.mkdir()
        ports = free_ports(6)
        command = _seaweedfs(place, ports) if name == "seaweedfs" else _moto(ports[0])
        endpoint, log_path = f"http://127.0.0.1:{ports[0]}", place / "server.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=place, preexec_fn=_die_with_the_parent
            )
        if _answers(process, endpoint):
            return process, endpoint
        _end(process)
        tried.append(f"{log_path}: {log_path.read_text()[-1000:]}")
    raise RuntimeError(f"{name} did not start in {NUM_STARTS} tries; the logs end with: {tried}")


def _end(process: subprocess.Popen) -> None:
    process.kill()  # SeaweedFS takes half a minute to end on SIGTERM
    process.wait(20)


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on, nor on the ports 10,000 above them."""
    free: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        free.append(port)
        if len(free) == count:
            return free
    raise RuntimeError(f"no {count} free ports in {PORTS}")


def _seaweedfs(folder: Path, ports: list[int]) -> list[str]:
    account = {"accessKey": KEY, "secretKey": SECRET}
    identity = {"name": "ferry", "credentials": [account], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    others = ("-master.port", "-volume.port", "-filer.port", "-s3.port.iceberg", "-s3.port.lance")
    return [
        str(Path(sys.executable).with_name("weed")),
        "server",
        *("-dir", str(folder / "data"), "-ip=127.0.0.1", "-filer", "-s3"),
        *(f"{flag}={port}" for flag, port in zip(others, ports[1:], strict=True)),
        *(f"-s3.port={ports[0]}", f"-s3.config={folder / 's3.json'}"),
        *("-master.volumeSizeLimitMB=64", "-volume.max=0"),
    ]


def _moto(port: int) -> list[str]:
    return [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]


def _answers(process: subprocess.Popen, endpoint: str) -> bool:
    """Whether it does before the deadline; False at once when it has ended."""
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urlopen(endpoint, timeout=5).close()
            return True
        except HTTPError:
            return True
        except (URLError, OSError):
            time.sleep(0.1)
    return False


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
