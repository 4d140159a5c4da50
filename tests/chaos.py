"""`make chaos`: many seeded rounds of faults on exchanges, and a table of what came of them.

Exit code 1 if anything was torn, lost, deleted in spite of a lease, hung, or said badly. A seed repeats its
run; `--only WORDS` repeats one kind of fault. Usage: `python tests/chaos.py [--rounds N] [--seed S]`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from chaos_faults import FAULTS
from chaos_world import Broken, World
from faults import silent_beats

ROUND_DEADLINE_S = 60
ROUNDS_PER_WORLD = 20
PROMISES = {
    "TORN": "torn versions read",
    "LEASED": "leased versions deleted",
    "LOST": "committed versions lost",
    "HANG": "hangs",
    "MESSAGE": "errors without file, expected, found or action",
    "UNEXPECTED": "surprises",
}


def hang(_signal: int, _frame: object) -> None:
    raise Broken(f"HANG a round did not end within {ROUND_DEADLINE_S} s")


def run(rounds: int, seed: int, only: str, outcomes: dict[str, Counter[str]]) -> list[str]:
    """Run the rounds; fills `outcomes` and returns what was broken."""
    names, broken, number = [name for name in FAULTS if only in name], [], 0
    signal.signal(signal.SIGALRM, hang)
    while number < rounds:
        with tempfile.TemporaryDirectory(dir=_folder()) as folder, silent_beats():
            world = World(Path(folder), random.Random(f"{seed}/{number}"))
            for _ in range(min(ROUNDS_PER_WORLD, rounds - number)):
                name = names[number % len(names)]
                signal.alarm(ROUND_DEADLINE_S)
                try:
                    outcomes.setdefault(name, Counter())[FAULTS[name](world)] += 1
                    world.check()
                except Broken as failed:
                    broken.append(f"round {number}, seed {seed}, {name}: {failed}")
                    outcomes.setdefault(name, Counter())["BROKEN"] += 1
                    number += 1
                    break  # the next world is whole
                finally:
                    signal.alarm(0)
                number += 1
    return broken


def _folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def report(rounds: int, outcomes: dict[str, Counter[str]], broken: list[str]) -> None:
    width = max(map(len, outcomes))
    for name, counts in outcomes.items():
        print(f"{name:<{width}}  {counts.total():>5}")
        for outcome, count in sorted(counts.items()):
            print(f"{'':<{width}}  {count:>5}  {outcome}")
    print(f"\n{rounds} rounds")
    for word, promise in PROMISES.items():
        print(f"{sum(f': {word}' in line for line in broken):>5} {promise}")
    for line in broken[:20]:
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Break exchanges in every way known, and look what comes of it."
    )
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds of fault with these words in their name")
    args = parser.parse_args()
    outcomes: dict[str, Counter[str]] = {}
    broken = run(args.rounds, args.seed, args.only, outcomes)
    report(args.rounds, outcomes, broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
