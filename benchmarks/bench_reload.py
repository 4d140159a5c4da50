"""What a new version costs a server that answers: the pause, and the time from publication to first use.

`make bench-reload` serves a random Qwen2 of about 250 MiB of adapted weights in each of the three ways and
publishes `--repeats` versions, one after the other. Everything is set beside what this machine can do in the
same run: the pause beside copying the changed bytes in memory once, the way from publication to use beside
reading the version's bytes and copying the changed ones once. Beside them what people do without us: vLLM's
own `reload_weights` of a complete directory (no pause, no check, nothing to go back to), and starting a
server anew. Numbers are medians. The exit code only says whether it ran.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fresh_engine import KV_CACHE_BYTES, MAX_MODEL_LEN, said_by
from reissue import Content, make_contents, reissuing
from tiny_model import CHARACTERS, make_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm_server import live_server

MIB = 1 << 20
MODES = ("merged", "fold", "adapter")
NUM_CONTENTS = 2
OWN_RELOAD_DEADLINE_S = 300
ROW = "{:34} {:>9} {:>9} {:>9} {:>11} {:>9}"


def make_base(directory: Path, num_layers: int, hidden: int) -> Path:
    config = Qwen2Config(
        num_hidden_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        vocab_size=len(CHARACTERS) + 2,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)  # pyright: ignore[reportArgumentType]
    make_tokenizer().save_pretrained(directory)
    return directory


def median_s(act: Callable[[], object], repeats: int) -> float:
    """Of some runs, after one to warm up."""
    act()
    return statistics.median(seconds(act) for _ in range(repeats))


def seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Bytes that this machine copies in memory, and reads from files it has read before, in a second."""

    copy: float
    read: float

    @classmethod
    def measured(cls, files: list[Path], repeats: int) -> Machine:
        size_bytes = sum(file.stat().st_size for file in files)
        source, target = (torch.ones(size_bytes, dtype=torch.uint8) for _ in range(2))
        copy_s = median_s(lambda: target.copy_(source), repeats)
        buffer = memoryview(target.numpy())
        read_s = median_s(lambda: read_all(files, buffer), repeats)
        return cls(copy=size_bytes / copy_s, read=size_bytes / read_s)


def read_all(files: list[Path], buffer: memoryview) -> None:
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One way to serve: medians over its applies, in seconds and bytes."""

    start_s: float
    stage_s: float
    pause_s: float
    published_to_served_s: float
    bytes_fetched: int
    bytes_changed: int


def serve(directory: Path, base: Path, contents: list[Content], apply: str, repeats: int) -> Served:
    exchange = directory / f"exchange-{apply}"
    with reissuing(exchange, base, contents, keep=2, grace_s=0.0) as reissuer:
        reissuer.issue()  # what a server that starts now applies first
        started = time.perf_counter()
        with live_server(directory, base, exchange, apply, name=apply) as server:
            start_s = time.perf_counter() - started
            for _ in range(repeats + 1):
                server.wait_for_version(reissuer.issue())
            applied = server.status()["applied"][-repeats:]
            assert server.status()["refused"] == []

    def median(name: str) -> float:
        return statistics.median(entry[name] for entry in applied)

    return Served(
        start_s=start_s,
        stage_s=median("stage_s"),
        pause_s=median("pause_s"),
        published_to_served_s=median("published_to_served_s"),
        bytes_fetched=fetched_bytes(contents[0], apply),
        bytes_changed=int(median("bytes_applied")),
    )


def fetched_bytes(content: Content, apply: str) -> int:
    if apply == "merged":
        return sum(len(data) for shard in content.shards.values() for _, data in shard)
    return sum(len(data) for name, data in content.files.items() if name.startswith("adapter/"))


def time_own_reload(directories: list[Path], repeats: int) -> float:
    """Median seconds of vLLM's own reload, in an engine without anything of ours."""
    request = json.dumps([list(map(str, directories)), repeats])
    return said_by(__file__, "SECONDS", "--own-reload", request, deadline_s=OWN_RELOAD_DEADLINE_S)


def own_reload(request: str) -> None:
    """In the process of its own."""
    from vllm import LLM

    torch.cpu._init_amx()  # as rollout_server/engine.py does; plug-ins are off here
    directories, repeats = json.loads(request)
    engine = LLM(
        directories[0],
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
    )
    engine.collective_rpc("update_config", args=({"load_config": {"use_tqdm_on_load": False}},))
    turns = iter(range(1, repeats + 2))

    def reload() -> Any:
        path = directories[next(turns) % len(directories)]
        return engine.collective_rpc("reload_weights", kwargs={"weights_path": path})

    print("SECONDS", json.dumps(median_s(reload, repeats)), sep="\n", flush=True)


def report(name: str, size_bytes: int, pause: tuple[float, float] | None, way: tuple[float, float]) -> None:
    """A line: what changed, the pause and the way to use in seconds, each with its floor."""

    def times(value: tuple[float, float]) -> tuple[str, str]:
        return f"{value[0]:.3f} s", f"{value[0] / value[1]:.1f} x"

    print(
        ROW.format(
            name, f"{size_bytes / MIB:.0f} MiB", *(times(pause) if pause else ("none", "")), *times(way)
        )
    )


def report_served(apply: str, served: Served, machine: Machine) -> None:
    copy_s = served.bytes_changed / machine.copy
    pause = (served.pause_s, copy_s) if apply != "adapter" else None
    floor_s = served.bytes_fetched / machine.read + copy_s
    report(f"--apply {apply}", served.bytes_changed, pause, (served.published_to_served_s, floor_s))


def main() -> int:
    parser = argparse.ArgumentParser(description="What a new version costs a server that answers.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    parser.add_argument("--own-reload", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own_reload:
        own_reload(args.own_reload)
        return 0
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        compare(Path(folder), args)
    return 0


def compare(directory: Path, args: argparse.Namespace) -> None:
    base = make_base(directory / "base", args.layers, args.hidden)
    contents = make_contents(directory, base, NUM_CONTENTS)
    whole = [content.directory for content in contents]
    shards = sorted(whole[0].glob("layer-*.safetensors"))
    served, machines = {}, [Machine.measured(shards, args.repeats)]
    for apply in args.modes:
        served[apply] = serve(directory, base, contents, apply, args.repeats)
        machines.append(Machine.measured(shards, args.repeats))
    own_s = time_own_reload(whole, args.repeats)
    # others may use the machine, too: it is as fast as it ever was
    machine = Machine(copy=max(m.copy for m in machines), read=max(m.read for m in machines))
    print(
        f"this machine copies {machine.copy / 1e9:.1f} GB/s and reads {machine.read / 1e9:.1f} GB/s (cached)"
    )
    print(ROW.format("", "changed", "pause", "/ copy", "publ.->use", "/ floor"))
    for apply, costs in served.items():
        report_served(apply, costs, machine)
    size_bytes = sum(file.stat().st_size for file in whole[0].glob("*.safetensors"))
    copy_s, read_s = size_bytes / machine.copy, size_bytes / machine.read
    report("vLLM's reload_weights, no pause", size_bytes, (own_s, copy_s), (own_s, read_s + copy_s))
    for apply, costs in served.items():
        start = (costs.start_s, read_s + copy_s)
        report(f"a new server, --apply {apply}", size_bytes, None, start)


if __name__ == "__main__":
    sys.exit(main())
