"""The same bytes published again and again: many versions of few contents, without training anything.

A content is taken once from a version that the exporter made; each `issue` writes it anew through the
exchange's own writer, as a whole new version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from exporter_ranks import Case, build, train

from weightferry.exporter.publisher import Publisher
from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.exchange import Exchange, Version
from weightferry.shared.manifest import AdapterEntry, TensorEntry
from weightferry.shared.publication import ManifestFields, Publication
from weightferry.shared.tensor_files import TensorSpec, read_header
from weightferry.shared.writer import ExchangeWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a version holds: changed shards, the names of tensors shared with the base, and other files."""

    directory: Path  # of the version that it was taken from
    shards: dict[str, list[tuple[TensorSpec, bytes]]]
    shared: dict[str, list[TensorSpec]]
    files: dict[str, bytes]
    adapter: AdapterEntry | None

    @classmethod
    def of(cls, version: Version) -> Content:
        shards: dict[str, list[tuple[TensorSpec, bytes]]] = {}
        shared: dict[str, list[TensorSpec]] = {}
        for entry in version.manifest.tensors:
            name = Path(entry.file).name
            if entry.changed:
                shards.setdefault(name, []).append(_tensor(version, entry))
            else:
                shared.setdefault(name, []).append(_spec(entry))
        others = [file.path.removeprefix(f"{version.dir}/") for file in version.manifest.files]
        weights = shards.keys() | shared.keys()
        files = {name: (version.path / name).read_bytes() for name in others if name not in weights}
        adapter = version.manifest.adapter
        return cls(directory=version.path, shards=shards, shared=shared, files=files, adapter=adapter)

    def write(self, publication: Publication, base: Checkpoint) -> Version:
        for name, shard in self.shards.items():
            publication.write_shard(name, shard)
        for name, specs in self.shared.items():
            publication.link_base_shard(name, specs, base.read_bytes)
        for name, data in self.files.items():
            publication.write_file(name, data)
        adapter = self.adapter and replace(self.adapter, dir=f"{publication.relative_dir}/adapter")
        return publication.commit(ManifestFields(published="both", world_size=1, adapter=adapter))


def _spec(entry: TensorEntry) -> TensorSpec:
    return TensorSpec(name=entry.name, dtype=entry.dtype, shape=entry.shape)


def _tensor(version: Version, entry: TensorEntry) -> tuple[TensorSpec, bytes]:
    slot = read_header(version.exchange_path / entry.file)[entry.name]
    return _spec(entry), (version.exchange_path / entry.file).read_bytes()[slot.begin : slot.end]


class Reissuer:
    """The writer of an exchange: its versions take turns with the contents."""

    def __init__(self, writer: ExchangeWriter, base: Path, contents: list[Content]) -> None:
        self.writer, self.contents, self._base = writer, contents, Checkpoint.open(base)
        self.numbers: list[int] = []

    def issue(self) -> int:
        """Publish the next version; its number."""
        content = self.contents[len(self.numbers) % len(self.contents)]
        version = content.write(self.writer.begin(len(self.numbers)), self._base)
        self.numbers.append(version.number)
        return version.number

    def content_of(self, number: int) -> int:
        """Which of the contents a version has."""
        return self.numbers.index(number) % len(self.contents)

    def next_after(self, number: int) -> int:
        return self.numbers[self.numbers.index(number) + 1]


def make_contents(directory: Path, base: Path, num: int) -> list[Content]:
    """Contents that adapt all linear layers, each with values of its own."""
    exchange = Exchange.open(directory / "first-issue", base=base)
    model = build(Case(base=base.name, lora={"target_modules": "all-linear"}), base.parent)
    contents = []
    with Publisher(model, exchange) as publisher:
        for step in range(num):
            train(model, seed=100 + step)
            contents.append(Content.of(publisher.publish(step).wait()))
    return contents


@contextmanager
def reissuing(
    exchange: Path, base: Path, contents: list[Content], *, keep: int, grace_s: float
) -> Iterator[Reissuer]:
    writer = ExchangeWriter.become(
        Exchange.open(exchange, base=base), run_id="reissue", keep=keep, grace_s=grace_s
    )
    try:
        yield Reissuer(writer, base, contents)
    finally:
        writer.close()
