"""Azurite, Microsoft's emulator of Azure Blob Storage, from npm, until the test ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import adlfs
import pytest
from s3_servers import free_ports

VERSION = "3.35.0"
CONTAINER = "ferry"
# the emulator's own well-known account, no secret: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "weightferry" / "azurite"
VARIABLE = "AZURE_STORAGE_CONNECTION_STRING"
START_DEADLINE_S = 60.0


@contextmanager
def azure_server(folder: Path) -> Iterator[str]:
    """A server with an empty container; has the environment point at it; yields its endpoint."""
    program, (port,) = _program(), free_ports(1)
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    command = [
        str(program), "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", str(folder),
        "--blobPort", str(port),
    ]  # fmt: skip
    log_path, before = folder / "server.log", os.environ.get(VARIABLE)
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        _wait_until_it_answers(process, endpoint, log_path)
        os.environ[VARIABLE] = (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
        )
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        adlfs.AzureBlobFileSystem().mkdir(CONTAINER)
        yield endpoint
    finally:
        os.environ.pop(VARIABLE, None) if before is None else os.environ.update({VARIABLE: before})
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        process.kill()
        process.wait(20)


def fresh_url() -> str:
    """A prefix of the container that nobody used before."""
    return f"abfs://{CONTAINER}/{uuid.uuid4().hex}"


def _program() -> Path:
    """Azurite's blob service, fetched once into the user's cache."""
    program = CACHE / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("Azurite runs where Node.js 20 or newer and npm are; npm is not here")
        CACHE.mkdir(parents=True, exist_ok=True)
        fetched = subprocess.run(
            [npm, "install", "--silent", "--no-audit", "--no-fund", f"azurite@{VERSION}"],
            cwd=CACHE,
            capture_output=True,
            text=True,
        )
        if fetched.returncode != 0:
            pytest.skip(f"Azurite runs where npm can fetch it; npm said: {fetched.stderr[-300:]}")
    return program


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
