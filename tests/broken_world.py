"""Where versions are broken: a real server that answers with an old version, and a writer of new ones.

"The old version answers" means: greedy answers are those of a fresh vLLM started on that version, and their
header names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from broken_versions import Broken
from fresh_engine import ask_fresh_engines, rank_environment
from reissue import Content, Reissuer, reissuing
from vllm_server import Answers, LiveServer, live_server
from worker_faults import Faults

PROMPTS = ["12 + 34 = ", "the policy says: ", "alpha " * 30]
TOKEN = "a-token-of-this-test"
OLD = "old version, exactly"
# how the server of each mode is started: --apply, other flags, environment
MODES: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "merged": ("merged", (), {}),
    "merged again": ("merged", (), {}),
    "adapter": ("adapter", (), {}),
    "fold": ("fold", (), {}),
    "2 ranks": ("merged", ("--tensor-parallel-size", "2"), rank_environment(2)),
}
Row = tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class World:
    """A server that answers with the old version, and a writer that publishes what comes next."""

    mode: str
    server: LiveServer
    reissuer: Reissuer
    faults: Faults
    references: list[Answers]
    rows: list[Row]
    old: int = 0
    old_content: int = 0

    @property
    def cache(self) -> Path:
        """Where the server stages."""
        return self.reissuer.writer.exchange.path.parent / "server-cache"

    def publish(self, broken: Broken, content: int) -> tuple[int, Path]:
        """Publish it while the server looks away, so that the harm is done when it looks; its directory."""
        self.control("pause-updates")
        number = self.publish_now(broken.write(self.reissuer.contents[content]))
        directory = self.reissuer.writer.exchange.version(number).path
        broken.harm(directory)
        return number, directory

    def publish_now(self, content: Content) -> int:
        saved = list(self.reissuer.contents)
        self.reissuer.contents[:] = [content]
        try:
            return self.reissuer.issue()
        finally:
            self.reissuer.contents[:] = saved

    def serve(self, content: int) -> int:
        """Publish a good version; it is the old one from now on."""
        number = self.publish_now(self.reissuer.contents[content])
        self.server.wait_for_version(number)
        self.old, self.old_content = number, content
        self.check_old_version_answers()
        return number

    def control(self, name: str) -> None:
        headers = {"authorization": f"Bearer {TOKEN}"}
        self.server.http.post(f"/weightferry/{name}", headers=headers).raise_for_status()

    def check_old_version_answers(self) -> None:
        assert self.server.ask_greedy(PROMPTS) == (self.references[self.old_content], {self.old})

    def check_refused(self, case: str, number: int, words: str) -> None:
        """It is refused with these words, and the old version answers; a line of the table."""
        reason = self.server.wait_for_refusal(number)
        assert words in reason
        assert self.server.status()["active_version"] == self.old
        self.check_old_version_answers()
        self.say(case, "refused it", reason, OLD)

    def say(self, case: str, did: str, words: str, answers: str) -> None:
        self.rows.append((case, self.mode, did, shortened(words), answers))


def shortened(words: str) -> str:
    """Without the directories, which are the test's own."""
    parts = [word.rpartition("/")[2] if word.startswith("/") else word for word in words.split()]
    return " ".join(parts)[:90]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """The contents that are published, and the base that they have in common."""

    directory: Path
    base: Path
    contents: list[Content]
    references: dict[tuple[bool, bool], list[Answers]] = field(default_factory=dict)

    def fresh_answers(self, mode: str) -> list[Answers]:
        """What a fresh vLLM answers with each content, merged or as an adapter, on as many ranks."""
        apply, _, ranks = MODES[mode]
        is_adapter, kind = apply == "adapter", (apply == "adapter", bool(ranks))
        if kind not in self.references:
            starts: list[tuple[Path, Path | None]] = [
                (self.base, content.directory / "adapter") if is_adapter else (content.directory, None)
                for content in self.contents
            ]
            answers = ask_fresh_engines(PROMPTS, starts, num_ranks=2 if ranks else 1)
            assert answers[0] != answers[1]
            self.references[kind] = answers
        return self.references[kind]


@contextmanager
def serving(material: Material, rows: list[Row], mode: str, name: str) -> Iterator[World]:
    """A world whose server answers with the first content; nothing is tried twice: one try decides."""
    apply, flags, ranks = MODES[mode]
    directory = material.directory / name
    directory.mkdir()
    exchange, faults = directory / "exchange", Faults(directory)
    environment = faults.environment | ranks | {"WEIGHTFERRY_MAX_TRIES": "1", "WEIGHTFERRY_TOKEN": TOKEN}
    with (
        live_server(directory, material.base, exchange, apply, *flags, environment=environment) as server,
        reissuing(exchange, material.base, list(material.contents), keep=100, grace_s=60.0) as reissuer,
    ):
        world = World(
            mode=mode,
            server=server,
            reissuer=reissuer,
            faults=faults,
            references=material.fresh_answers(mode),
            rows=rows,
        )
        world.serve(0)
        yield world
