"""A base of four small tensors and versions of random bytes: for tests of the exchange, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.exchange import Exchange, Version
from weightferry.shared.publication import ManifestFields
from weightferry.shared.writer import ExchangeWriter

CHANGED = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight")
UNCHANGED = ("model.embed_tokens.weight", "model.norm.weight")


def make_base(directory: Path, seed: int = 0) -> Path:
    """A checkpoint directory; another seed makes another base of the same shapes."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(seed)
    tensors = {name: random.random((8, 4), dtype=np.float32) for name in (*CHANGED, *UNCHANGED)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    return directory


def publish(writer: ExchangeWriter, step: int) -> Version:
    """Publish a version whose changed tensors hold the step's own random bytes."""
    exchange = writer.exchange
    assert exchange.base_dir is not None
    checkpoint = Checkpoint.open(exchange.base_dir)
    random = np.random.default_rng(1000 + step)
    publication = writer.begin(step)
    shard = [(checkpoint.specs[name], random.random((8, 4), dtype=np.float32).tobytes()) for name in CHANGED]
    publication.write_shard("layer-00000.safetensors", shard)
    specs = [checkpoint.specs[name] for name in UNCHANGED]
    publication.link_base_shard("outer.same.safetensors", specs, checkpoint.read_bytes)
    publication.write_index()
    publication.write_file("config.json", (exchange.base_dir / "config.json").read_bytes())
    return publication.commit(ManifestFields(published="merged", world_size=1))


@contextmanager
def writing(exchange: Exchange, run_id: str = "run-a", ttl_s: float = 30.0) -> Iterator[ExchangeWriter]:
    """Be the writer for a while, and leave cleanly."""
    writer = ExchangeWriter.become(exchange, run_id=run_id, writer_ttl_s=ttl_s)
    try:
        yield writer
    finally:
        writer.close()


def main() -> None:
    """`python -m tests.tiny_exchange EXCHANGE BASE STEP...`: a writer process that tests can kill."""
    import sys

    exchange = Exchange.open(sys.argv[1], base=sys.argv[2])
    with writing(exchange, run_id="killed-run") as writer:
        for step in sys.argv[3:]:
            print(publish(writer, int(step)).number, flush=True)


if __name__ == "__main__":
    main()
