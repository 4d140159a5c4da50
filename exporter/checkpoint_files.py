"""What makes a version directory a whole checkpoint beside its weights: config and tokenizer files.

They are the base's own, byte for byte, but for the few lines of the config that a version must not repeat.
Called by the publisher; pure but for reading the base's directory. Follows docs/format.md [1] and [4].
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..shared.errors import FormatError
from ..shared.manifest import check_path

CONFIG_NAME = "config.json"
_SUFFIXES = (".json", ".txt", ".model", ".jinja")
# An adapter beside a checkpoint would be loaded on top of it, and other indexes name files that are not here.
_LEFT_BEHIND = (CONFIG_NAME, "adapter_config.json")


def side_files(base: Path, *, is_untied: bool) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each file; `is_untied`: the version holds two tensors where the base has one, tied."""
    yield CONFIG_NAME, config_bytes((base / CONFIG_NAME).read_bytes(), is_untied=is_untied)
    for path in sorted(base.iterdir()):
        is_wanted = path.suffix in _SUFFIXES and path.name not in _LEFT_BEHIND
        if is_wanted and not path.name.endswith(".index.json") and path.is_file() and _is_plain(path.name):
            yield path.name, path.read_bytes()


def config_bytes(data: bytes, *, is_untied: bool) -> bytes:
    """The base's config.json for merged weights; the same bytes if nothing in it must change."""
    config: dict[str, Any] = json.loads(data)
    wanted = {key: value for key, value in config.items() if key != "quantization_config"}
    if names := wanted.get("architectures"):  # saved from a model that fully_shard had renamed
        wanted["architectures"] = [name.removeprefix("FSDP") for name in names]
    if is_untied:
        wanted["tie_word_embeddings"] = False
        if isinstance(text := wanted.get("text_config"), dict):
            wanted["text_config"] = text | {"tie_word_embeddings": False}
    if wanted == config:
        return data
    return json.dumps(wanted, indent=2, sort_keys=True).encode() + b"\n"


def _is_plain(name: str) -> bool:
    """No tokenizer file has a name that an exchange refuses; notes of people may."""
    try:
        return bool(check_path(name))
    except FormatError:
        return False
