"""One engine with our worker extension, given loads that fail in every way, and good ones in between.

`python tests/failing_reloads.py BASE OTHER DIRECTORY` prints, after the line "STORY", a JSON list of [what
was loaded, the worker's answer, the token ids afterwards or null].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fresh_engine import KV_CACHE_BYTES, MAX_MODEL_LEN, MAX_TOKENS, said_by
from safetensors.torch import load_file, save_file

from weightferry.rollout_server.engine import WORKER_EXTENSION

PROMPTS = ["12 + 34 = ", "alpha " * 30]


def tell_story(base: Path, other: Path, directory: Path) -> list[tuple[str, dict[str, Any], Any]]:
    return said_by(__file__, "STORY", *map(str, (base, other, directory)))


def write_bad_files(directory: Path, good: Path) -> dict[str, Path]:
    """Files that fail at their last tensors: the worker has changed some before."""
    tensors = load_file(good)
    late = "model.layers.1.self_attn.v_proj.weight"
    bad = {
        "a wrong shape": tensors | {late: tensors[late][:-1].clone()},
        "a wrong shape of the head": tensors | {"lm_head.weight": tensors["lm_head.weight"][:, 1:].clone()},
        "a tensor that the model lacks": tensors
        | {"model.layers.7.mlp.up_proj.weight": tensors[late].clone()},
    }
    files = {}
    for number, (what, content) in enumerate(bad.items()):
        files[what] = directory / f"bad-{number}.safetensors"
        save_file(content, files[what])
    files["a file that is not there"] = directory / "nowhere"
    files["a file that was cut"] = directory / "cut"
    files["a file that was cut"].write_bytes(good.read_bytes()[:-1000])
    return files


def main() -> None:
    import torch
    from vllm import LLM, SamplingParams

    torch.cpu._init_amx()  # as rollout_server/engine.py does; plug-ins are off here
    base, other, directory = map(Path, sys.argv[1:])
    engine = LLM(
        str(base),
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        worker_extension_cls=WORKER_EXTENSION,
    )
    names = list(load_file(base / "model.safetensors"))
    story = []

    def load(what: str, *files: Path, tensors: list[str] = names) -> None:
        parts = [{"file": str(file), "tensors": tensors_of(file, tensors)} for file in files]
        (answer,) = engine.collective_rpc("weightferry_reload", args=(parts,))
        tokens = None
        if answer["ok"]:
            engine.reset_prefix_cache()
            outputs = engine.generate(
                PROMPTS, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False
            )
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
        story.append((what, answer, tokens))

    good = {"base": base / "model.safetensors", "other": other / "model.safetensors"}
    load("base", good["base"])
    load("other", good["other"])
    for what, file in write_bad_files(directory, good["base"]).items():
        load(what, file)
        load("other", good["other"])
    load("nothing", good["base"], tensors=[])
    print("STORY", json.dumps(story), sep="\n", flush=True)


def tensors_of(file: Path, tensors: list[str]) -> list[str]:
    """Those of `tensors`, and what only this file holds."""
    from weightferry.shared.errors import IntegrityError
    from weightferry.shared.tensor_files import read_header

    try:
        return sorted({*tensors, *(name for name in read_header(file) if "layers.7" in name)})
    except IntegrityError:
        return tensors


if __name__ == "__main__":
    main()
