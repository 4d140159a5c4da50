"""What a rank that writes has at hand, and who writes: every rank if all reach the exchange, else rank 0.

Decided by trial when a publisher is made: rank 0 leaves a token in the exchange; every other rank must read
it through the same URL, open the same base, and answer with a file that rank 0 can read. If one cannot, rank
0 writes alone, and says so in one line. Ranks for which the token is the same inode of the same kernel share
its pages, and may fill one file together; that two hosts' file system is as coherent cannot be found out.
Follows docs/format.md [5] 3.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..shared.checkpoint import Checkpoint
from ..shared.digest import canonical_json, xxh3_128
from ..shared.errors import ConfigError, UnsupportedError
from ..shared.exchange import Exchange
from ..shared.store import Store
from .collectives import ControlGroup
from .live_base import LiveBase

_LOG = logging.getLogger(__name__)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What a writing rank has from start to end."""

    exchange: Exchange
    checkpoint: Checkpoint
    live_base: LiveBase

    @classmethod
    def of(cls, exchange: Exchange | None) -> Desk:
        if exchange is None or exchange.base_dir is None or exchange.base_digests is None:
            raise ConfigError("rank 0 must open the exchange with its base: Exchange.open(url, base=DIR)")
        checkpoint = Checkpoint.open(exchange.base_dir)
        live_base = LiveBase(checkpoint, exchange.base_digests)
        return cls(exchange=exchange, checkpoint=checkpoint, live_base=live_base)

    @classmethod
    def like(cls, told: dict[str, Any]) -> Desk:
        """The desk of rank 0, on another rank; raises whatever keeps this rank from having it."""
        exchange = Exchange.open(told["url"])
        exchange.base_dir, exchange.base_digests = Checkpoint.open(told["base_dir"]).path, told["digests"]
        desk = cls.of(exchange)
        if exchange.exchange_id != told["exchange_id"] or desk.slots_digest != told["slots"]:
            raise UnsupportedError(
                f"another exchange lies at {told['url']}, or another base at {told['base_dir']}"
            )
        return desk

    def to_json(self) -> dict[str, Any]:
        """What another rank needs to have the same; digests are told, so that only rank 0 reads the base."""
        return {
            "url": self.exchange.store.where(""),
            "exchange_id": self.exchange.exchange_id,
            "base_dir": str(self.checkpoint.path.absolute()),
            "digests": self.exchange.base_digests,
            "slots": self.slots_digest,
        }

    @property
    def slots_digest(self) -> str:
        """Changes with every name, shape, dtype and place of a tensor in the base's files."""
        slots = self.checkpoint.slots
        rows = [
            [name, str(slot.spec), slot.begin, self.checkpoint.file_of[name]] for name, slot in slots.items()
        ]
        return xxh3_128(canonical_json(sorted(rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Whether every rank writes, and whether all of them may write into one file."""

    all_write: bool
    share_files: bool


def desk_of_this_rank(control: ControlGroup, own: Desk | None) -> tuple[Desk | None, Reach]:
    """This rank's desk, and who writes; `own` is rank 0's. Collective."""
    if control.world_size == 1:
        return own, Reach(all_write=True, share_files=False)
    token, nonce = f".tmp-reach-{uuid.uuid4().hex}", uuid.uuid4().hex

    def tell() -> dict[str, Any]:
        assert own is not None  # asked on rank 0 only
        own.exchange.store.replace(token, nonce.encode(), sync=False)
        return own.to_json() | {"token": token}

    told = control.from_first(tell)
    joined, why_not = (own, "") if own is not None else _join(told, control.rank)
    sees = None if joined is None else _identity(joined, told["token"])
    answers = control.to_first(lambda: {"why_not": why_not, "sees": sees})

    def judge() -> dict[str, Any]:
        assert own is not None
        names = [f"{token}.{rank}" for rank in range(1, control.world_size)]
        cannot = _unreachable(own.exchange.store, [token, *names], answers, nonce)
        first = answers[0]["sees"]
        share_files = first is not None and all(answer["sees"] == first for answer in answers)
        return {"cannot": cannot, "share_files": share_files and not cannot}

    verdict = control.from_first(judge)
    if verdict["cannot"]:
        if own is not None:
            _LOG.warning("rank 0 writes every version alone: %s", "; ".join(verdict["cannot"]))
        return own, Reach(all_write=False, share_files=False)
    return joined, Reach(all_write=True, share_files=verdict["share_files"])


def _join(told: dict[str, Any], rank: int) -> tuple[Desk | None, str]:
    """The desk, or why there is none; the answer is the token's content, in a file beside it."""
    try:
        desk = Desk.like(told)
        content = desk.exchange.store.read(told["token"])
        if content is None:
            return None, f"what rank 0 wrote into {told['url']} is not there"
        desk.exchange.store.replace(f"{told['token']}.{rank}", content, sync=False)
        return desk, ""
    except (
        Exception
    ) as error:  # of a file system or a client that is not known here; it only decides who writes
        return None, f"{type(error).__name__}: {error}"


def _identity(desk: Desk, token: str) -> list[Any] | None:
    """The kernel, the device and the inode that the token is for this rank; None in a bucket."""
    if (path := desk.exchange.store.path) is None:
        return None
    try:
        found = (path / token).stat()
        return [_BOOT_ID.read_text(), found.st_dev, found.st_ino]
    except OSError:
        return None


def _unreachable(store: Store, names: list[str], answers: list[dict[str, Any]], nonce: str) -> list[str]:
    """The ranks that cannot write, each with its reason; removes the token and the answers."""
    cannot = []
    for rank, (name, answer) in enumerate(zip(names, answers, strict=True)):
        if (why_not := answer["why_not"]) or store.read(name) != nonce.encode():
            cannot.append(f"rank {rank} does not reach the exchange ({why_not or 'its answer is not there'})")
        store.remove(name)
    return cannot
