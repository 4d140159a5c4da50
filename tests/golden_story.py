"""An exchange in which every file that format 1 knows occurs, the same bytes each time.

`python tests/golden_story.py` writes it anew below tests/golden/exchange; do that only when the format itself
changes, and say so in the changelog.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from faults import silent_beats
from tiny_exchange import make_base, publish

from weightferry.shared.exchange import Exchange
from weightferry.shared.manifest import WriterInfo
from weightferry.shared.pins import pin, unpin
from weightferry.shared.retention import Pruner, RetentionPolicy
from weightferry.shared.signing import HmacKey
from weightferry.shared.writer import ExchangeWriter

GOLDEN = Path(__file__).parent / "golden" / "exchange"
PROCESS = {"host": "gpu-03", "boot_id": "b", "pid_namespace": "pid:[1]", "pid": 4711, "started": "123"}
WRITER = WriterInfo(host="gpu-03", pid=4711, world_size=1, packages={"weightferry": "0.1.0"})
KEY = HmacKey(secret=b"0123456789abcdef0123456789abcdef")
SHARED = "weightferry.shared"


@contextmanager
def nothing_by_chance() -> Iterator[None]:
    """Ids count, the clock stands, and the process is always the same one."""
    count = iter(range(1, 1000))
    fixed = {
        "uuid.uuid4": lambda: uuid.UUID(int=next(count) * 0x0123456789ABCDEF0123456789 % 2**128),
        f"{SHARED}.commit_log.now": lambda: "2026-12-01T00:00:00.000+00:00",
        f"{SHARED}.exchange.now": lambda: "2026-12-01T00:00:00.000+00:00",
        f"{SHARED}.publication.now": lambda: "2026-12-01T00:00:00.000+00:00",
        f"{SHARED}.publication._writer_info": lambda _world_size: WRITER,
    }
    for module in ("writer", "lease"):
        fixed[f"{SHARED}.{module}.process_identity"] = lambda: PROCESS
    for module in ("writer", "pins", "retention"):
        fixed[f"{SHARED}.{module}.owner_name"] = lambda: "gpu-03 pid 4711"
    with ExitStack() as stack:
        stack.enter_context(silent_beats())
        for name, value in fixed.items():
            stack.enter_context(patch(name, value))
        yield


@contextmanager
def golden_exchange(folder: Path) -> Iterator[Path]:
    """The exchange while a writer is at work, a reader holds a version, and one was given up and deleted."""
    with nothing_by_chance():
        base = make_base(folder / "base")
        exchange = Exchange.open(folder / "exchange", base=base, model_name="org/tiny", revision="main")
        writer = ExchangeWriter.become(exchange, run_id="run-7", writer_ttl_s=0, signing_key=KEY)
        numbers = [publish(writer, step).number for step in (10, 20, 30)]
        pin(exchange, numbers[0])
        pin(exchange, numbers[2])
        unpin(exchange, numbers[2])
        pruner = Pruner(exchange, RetentionPolicy(keep=1), grace_s=0)
        pruner.give_up()
        pruner.advance()
        with exchange.open_version(numbers[2], reader="gpu-07:99"):
            yield exchange.path


def files_of(exchange: Path) -> dict[str, bytes]:
    return {str(p.relative_to(exchange)): p.read_bytes() for p in exchange.rglob("*") if p.is_file()}


def main() -> int:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder, golden_exchange(Path(folder)) as path:
        for name, data in files_of(path).items():
            (GOLDEN / name).parent.mkdir(parents=True, exist_ok=True)
            (GOLDEN / name).write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
