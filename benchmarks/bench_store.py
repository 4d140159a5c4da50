"""Publishing and reading through an exchange in a bucket, beside the same bytes through the store's client.

`make bench-store` starts an S3 server (SeaweedFS) on this machine, or uses `--url s3://bucket/prefix` with
the client's own credentials. The client writes and reads the same files, one after another, with s3fs' put
and get, which send the parts of one file concurrently. Ours also digests every byte, twice for tensors, and
reads as a server does, into a cache that need not survive a power cut. Numbers are medians of `--repeats`;
exit code 1 if one of ours takes more than 1.3 times the client's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from s3_servers import fresh_url, s3_server
from safetensors.numpy import save_file

from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.exchange import Exchange, Version
from weightferry.shared.materialize import materialize
from weightferry.shared.object_store import open_object_store
from weightferry.shared.publication import ManifestFields
from weightferry.shared.writer import ExchangeWriter

LIMIT = 1.3
MIB = 1 << 20


def make_base(directory: Path, num_shards: int, shard_bytes: int) -> Path:
    """A base of one tensor a shard."""
    directory.mkdir()
    tensors = {
        f"model.layers.{i}.mlp.down_proj.weight": np.zeros((shard_bytes // 4096, 1024), dtype=np.float32)
        for i in range(num_shards)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": "bench"}))
    return directory


def publish(writer: ExchangeWriter, checkpoint: Checkpoint, data: bytes, step: int) -> Version:
    publication = writer.begin(step)
    for i, name in enumerate(sorted(checkpoint.specs)):
        spec = checkpoint.specs[name]
        publication.write_shard(f"layer-{i:05d}.safetensors", [(spec, data)])
    publication.write_index()
    return publication.commit(ManifestFields(published="merged", world_size=1))


def compare(url: str, folder: Path, num_shards: int, shard_bytes: int, repeats: int) -> dict[str, float]:
    base = make_base(folder / "base", num_shards, shard_bytes)
    exchange, checkpoint = Exchange.open(f"{url}/exchange", base=base), Checkpoint.open(base)
    data = np.random.default_rng(0).bytes(shard_bytes)
    (folder / "shard").write_bytes(data)
    client = open_object_store(f"{url}/client")._fs
    keys = [f"{url}/client/{i}" for i in range(num_shards)]
    times: dict[str, list[float]] = {"publish": [], "client put": [], "read": [], "client get": []}
    writer = ExchangeWriter.become(exchange, run_id="bench")
    for turn in range(repeats):
        start = time.perf_counter()
        version = publish(writer, checkpoint, data, turn)
        times["publish"].append(time.perf_counter() - start)

        start = time.perf_counter()
        for key in keys:
            client.put_file(str(folder / "shard"), key)
        times["client put"].append(time.perf_counter() - start)

        start = time.perf_counter()
        materialize(version, folder / f"copy-{turn}", sync=False)
        times["read"].append(time.perf_counter() - start)

        (folder / f"plain-{turn}").mkdir()
        start = time.perf_counter()
        for i, key in enumerate(keys):
            client.get_file(key, str(folder / f"plain-{turn}" / str(i)))
        times["client get"].append(time.perf_counter() - start)
    writer.close()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Exchange in a bucket against the store's own client.")
    parser.add_argument("--url", help="an S3 prefix (default: a server on this machine)")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--shard-mib", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with ExitStack() as stack:
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a busy disk would drown the rest
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=in_memory)))
        (folder / "server").mkdir()
        if args.url is None:
            stack.enter_context(s3_server("seaweedfs", folder / "server"))
        url = args.url or fresh_url()
        medians = compare(url, folder, args.shards, args.shard_mib * MIB, args.repeats)
    total_mib, too_slow = args.shards * args.shard_mib, False
    for ours, theirs in (("publish", "client put"), ("read", "client get")):
        ratio = medians[ours] / medians[theirs]
        too_slow = too_slow or ratio > LIMIT
        speeds = ", ".join(f"{name} {total_mib / medians[name]:.0f} MiB/s" for name in (ours, theirs))
        print(f"{ours}: {ratio:.2f} of the client's time ({total_mib} MiB: {speeds})")
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
