"""Publishing from an FSDP2 model: peak memory against depth, and time against raw writing and a rival.

`make bench-export` publishes a random Qwen2 of two depths from two ranks. In the same run: the same bytes by
plain writes and fsync (the raw limit), and what people write by hand (the rival): gather the whole model on
rank 0, merge it there, and save it with safetensors. Peaks are of anonymous memory (RssAnon), the largest of
any rank, above what the rank had before; numbers are medians of `--repeats` after one publication to warm up.
Exit code 1 if the deep model's publish takes 10 % more memory than the shallow one's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from exporter_ranks import Case, build, open_exchange, place, shard
from peft import PeftModel
from ranks import run_on_ranks
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from weightferry.exporter.publisher import Publisher

LIMIT = 1.10
MIB = 1 << 20
SAMPLE_S = 0.002
DEPTHS = (4, 24)
WORLD_SIZE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds, and bytes of anonymous memory above the start."""

    seconds: float
    peak_bytes: int


def make_base(directory: Path, num_layers: int, hidden: int) -> None:
    config = Qwen2Config(
        num_hidden_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def rss_anon() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def cost_of(act: Callable[[], object]) -> Cost:
    """Run `act` while another thread looks at this process's memory."""
    before, done = rss_anon(), threading.Event()
    peaks = [before]

    def look() -> None:
        while not done.wait(SAMPLE_S):
            peaks.append(rss_anon())

    thread = threading.Thread(target=look)
    thread.start()
    start = time.perf_counter()
    try:
        act()
        seconds = time.perf_counter() - start
    finally:
        done.set()
        thread.join()
    return Cost(seconds=seconds, peak_bytes=max(peaks) - before)


def measure(directory: Path, base: str, repeats: int) -> dict[str, list[Cost]]:
    """On each rank: the costs of publishing, of writing the same bytes, and of the rival."""
    rank, world_size = place()
    model = shard(
        build(Case(base=base, lora={"target_modules": "all-linear", "r": 16}), directory), world_size
    )
    exchange = open_exchange(rank, directory / f"exchange-{base}", directory / base)
    costs: dict[str, list[Cost]] = {"publish": [], "raw": [], "rival": []}
    with Publisher(model, exchange, publish="both", keep=1, grace_s=0.0) as publisher:
        version = publisher.publish(0).wait()
        size_bytes = version.manifest.changed_bytes
        for step in range(1, repeats + 1):
            costs["publish"].append(cost_of(lambda step=step: publisher.publish(step)))
            costs["rival"].append(
                cost_of(lambda: gather_merge_and_save(model, directory / "rival.safetensors"))
            )
            if rank == 0:
                costs["raw"].append(cost_of(lambda: write_raw(directory / "raw", size_bytes)))
    return costs


def write_raw(path: Path, size_bytes: int) -> None:
    block = bytes(16 * MIB)
    with path.open("wb", buffering=0) as file:
        for begin in range(0, size_bytes, len(block)):
            file.write(block[: size_bytes - begin])
        os.fsync(file.fileno())
    path.unlink()


def gather_merge_and_save(model: PeftModel, path: Path) -> None:
    """Every tensor whole on rank 0, merged there, written by one rank."""
    rank, whole = place()[0], {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if rank == 0:
            whole[name] = full.detach()
    if rank != 0:
        return
    merged = {name: tensor for name, tensor in whole.items() if "lora_" not in name}
    for name, lora_b in whole.items():
        if ".lora_B." in name:
            weight = name.replace(".lora_B.default.", ".base_layer.")
            lora_a = whole[name.replace(".lora_B.", ".lora_A.")]
            merged[weight] = (merged[weight].float() + 0.5 * (lora_b @ lora_a)).to(merged[weight].dtype)
    save_file(merged, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    path.unlink()


def report(num_layers: int, by_rank: list[dict[str, list[Cost]]]) -> int:
    """Print one depth's line; returns the publication's peak in bytes."""

    def seconds(what: str) -> float:
        return statistics.median(cost.seconds for cost in by_rank[0][what])

    def peak(what: str) -> int:
        return max(int(statistics.median(c.peak_bytes for c in costs[what])) for costs in by_rank)

    print(
        f"{num_layers:3d} layers: publish {seconds('publish'):.2f} s = "
        f"{seconds('publish') / seconds('raw'):.1f} of raw writing, "
        f"{seconds('publish') / seconds('rival'):.2f} of gathering on rank 0; "
        f"peak {peak('publish') / MIB:.0f} MiB, gathering on rank 0 {peak('rival') / MIB:.0f} MiB"
    )
    return peak("publish")


def main() -> int:
    parser = argparse.ArgumentParser(description="Publishing from two FSDP2 ranks.")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    args = parser.parse_args()
    # memory that was freed goes back at once, or else it would hide what the next measurement takes
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    peaks = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for num_layers in DEPTHS:
            base = f"base-{num_layers}"
            make_base(Path(folder) / base, num_layers, args.hidden)
            costs = run_on_ranks(
                measure, Path(folder), base, args.repeats, world_size=WORLD_SIZE, deadline_s=900
            )
            peaks[num_layers] = report(num_layers, costs)
    shallow, deep = DEPTHS
    ratio = peaks[deep] / peaks[shallow]
    print(f"peak memory at {deep} layers / at {shallow}: {ratio:.2f} (at most {LIMIT})")
    return 1 if ratio > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
