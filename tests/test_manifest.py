"""The manifest: one byte form, and nothing unsound gets through (format.md [2])."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from weightferry.shared.base import BaseIdentity
from weightferry.shared.commit_log import LogEntry
from weightferry.shared.errors import FormatError, IntegrityError
from weightferry.shared.manifest import (
    AdapterEntry,
    AdapterModule,
    FileEntry,
    Manifest,
    TensorEntry,
    WriterInfo,
    manifest_id,
)

DIGEST = "0123456789abcdef0123456789abcdef"
BASE = BaseIdentity(
    model="org/tiny", revision=None, config_digest="c0", tensors_digest=DIGEST, num_tensors=1, size_bytes=12
)


def a_manifest(**changes) -> Manifest:
    fields = {
        "exchange_id": "e1",
        "run_id": "r1",
        "epoch": 3,
        "step": 100,
        "created": "2026-12-01T00:00:00.000+00:00",
        "writer": WriterInfo(host="gpu-03", pid=4711, world_size=2, packages={"torch": "2.13.0"}),
        "base": BASE,
        "published": "both",
        "files": (FileEntry(path="versions/v/layer-00000.safetensors", size_bytes=116, xxh3_128=DIGEST),),
        "tensors": (
            TensorEntry(
                name="w",
                dtype="BF16",
                shape=(2, 3),
                file="versions/v/layer-00000.safetensors",
                xxh3_128=DIGEST,
                changed=True,
            ),
        ),
        "adapter": AdapterEntry(
            dir="versions/v/adapter",
            config_sha256="ab",
            modules=(AdapterModule(name="w", rank=8, scaling=2.0),),
        ),
        "tied": (("lm_head.weight", "embed.weight"),),
    }
    return Manifest(**fields | changes)


def test_a_manifest_survives_its_byte_form():
    manifest = a_manifest()
    assert Manifest.from_bytes(manifest.to_bytes(), "m") == manifest


def golden(name: str) -> bytes:
    return (Path(__file__).parent / "golden" / name).read_bytes()


def test_golden_bytes_of_a_manifest():
    assert a_manifest().to_bytes() == golden("manifest.json")
    assert Manifest.from_bytes(golden("manifest.json"), "m") == a_manifest()
    assert manifest_id(golden("manifest.json")) == hashlib.sha256(golden("manifest.json")).hexdigest()


def test_golden_bytes_of_a_log_entry(tmp_path):
    entry = LogEntry(
        kind="version",
        number=42,
        epoch=3,
        run_id="r1",
        nonce="n",
        owner="gpu-03 pid 4711",
        created="2026-12-01T00:00:00.000+00:00",
        dir="versions/step00000100-e0003-1f2a9c",
        step=100,
        manifest_sha256="ff",
        watermark=40,
        kept=(7,),
    )
    assert entry.to_bytes() == golden("000000000042.json")
    read = LogEntry.from_bytes(golden("000000000042.json"), tmp_path / "000000000042.json")
    assert replace(read, xxh3_128=None) == entry
    data = golden("000000000042.json").replace(b'"watermark": 40', b'"watermark": 41')
    with pytest.raises(IntegrityError, match=r"has other bytes: .* restore the file"):
        LogEntry.from_bytes(data, tmp_path / "000000000042.json")
    with pytest.raises(FormatError, match="not what its name promises"):
        LogEntry.from_bytes(golden("000000000042.json"), tmp_path / "000000000041.json")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "a//b", "", "a b", "a\n", "./a", "a/.", "ü", "a\\b"]
)
def test_a_path_out_of_the_exchange_is_refused(path):
    value = json.loads(a_manifest(tensors=()).to_bytes())
    value["files"][0]["path"] = path
    with pytest.raises(FormatError, match="is refused"):
        Manifest.from_bytes(json.dumps(value).encode(), "m")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format 2; this weightferry reads format 1"),
        ({"surprise": 1}, "unknown fields"),
        ({"published": "half"}, "published='half'"),
        ({"files": []}, "not among its files"),
        ({"writer": {}}, "not a manifest"),
    ],
)
def test_an_unsound_manifest_is_refused(change, words):
    value = json.loads(a_manifest().to_bytes()) | change
    with pytest.raises(FormatError, match=words):
        Manifest.from_bytes(json.dumps(value).encode(), "m")


def test_what_is_not_json_is_refused():
    with pytest.raises(FormatError, match="is not JSON"):
        Manifest.from_bytes(b"\xff", "m")
