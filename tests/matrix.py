"""The whole matrix, variant x sharding x family: which cells there are, running them, the table of outcomes.

    python tests/matrix.py            # every cell; prints the tables and writes DOCUMENT
    python tests/matrix.py --thin     # the cells of the fast suite; prints only

Cells of one world size share one run of ranks. A table shows two of the three sides at a time: its entry is
good only if every cell behind it is.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

from matrix_cells import Cell, prepare, run_cells
from matrix_families import FAMILIES
from matrix_shardings import SHARDINGS
from matrix_variants import VARIANTS
from ranks import run_on_ranks

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "matrix.md"
DEADLINE_S = 7200.0
GOOD, REFUSED, ABSENT = "ok", "refused", "."

# One family for what differs by variant and sharding, one variant for what differs by family.
MAIN_FAMILY, MAIN_VARIANT, MAIN_SHARDING = "qwen2", "LoRA", "FSDP2 x2"


def every_cell() -> list[Cell]:
    """The three faces of the cube: all pairs of two sides, with one or two values of the third."""
    places = [
        *product(FAMILIES, VARIANTS, ("unsharded", MAIN_SHARDING)),
        *product((MAIN_FAMILY,), VARIANTS, SHARDINGS),
        *product(FAMILIES, (MAIN_VARIANT, "experts"), SHARDINGS),
    ]
    return _applying(places)


def thin_cells() -> list[Cell]:
    """Every family, variant and sharding a few times, each variant on another family."""
    families = list(FAMILIES)
    places = [
        *product(families, (MAIN_VARIANT,), ("unsharded",)),
        *product(families, ("experts",), (MAIN_SHARDING,)),
        *product((MAIN_FAMILY,), (MAIN_VARIANT,), SHARDINGS),
    ]
    for number, variant in enumerate(VARIANTS):
        turned = families[number % len(families) :] + families[: number % len(families)]
        sharding = MAIN_SHARDING if number % 3 else "unsharded"
        fitting = _applying(product(turned, (variant,), (sharding,)))
        places += [(cell.family, variant, cell.sharding) for cell in fitting[:1]]
    return _applying(places)


def _applying(places: Iterable[tuple[str, str, str]]) -> list[Cell]:
    cells = [Cell(family=family, variant=variant, sharding=sharding) for family, variant, sharding in places]
    return [cell for cell in dict.fromkeys(cells) if cell.applies]


def run(cells: Iterable[Cell], directory: Path, say: Callable[[str], object]) -> dict[Cell, str]:
    """The outcome of each cell; the empty text is a good one."""
    wanted = list(cells)
    by_reference = {cell.reference: cell for cell in wanted}
    firsts = list(by_reference.values())
    (prepared,) = run_on_ranks(prepare, directory, firsts, world_size=1, deadline_s=DEADLINE_S)
    say(f"{len(firsts)} references")
    said = dict(zip(by_reference, prepared, strict=True))
    outcomes = {cell: said[cell.reference] for cell in wanted}
    for world_size in sorted({SHARDINGS[cell.sharding].world_size for cell in wanted}):
        mine = [c for c in wanted if SHARDINGS[c.sharding].world_size == world_size and not outcomes[c]]
        start = time.monotonic()
        by_rank = run_on_ranks(
            run_cells, directory, mine, world_size=max(1, world_size), deadline_s=DEADLINE_S
        )
        for cell, words in zip(mine, zip(*by_rank, strict=True), strict=True):
            outcomes[cell] = next(filter(None, words), "")
        say(f"{len(mine)} cells on {max(1, world_size)} rank(s): {time.monotonic() - start:.0f} s")
    return outcomes


def document(outcomes: dict[Cell, str]) -> str:
    """The tables, as Markdown."""
    num_bad = sum(bool(outcome) for outcome in outcomes.values())
    return HEAD.format(num_cells=len(outcomes), num_bad=num_bad) + "".join(
        f"\n## {title}\n\n{_table(outcomes, row, column, rows, columns)}"
        for title, row, column, rows, columns in (
            ("Variant by family", "variant", "family", VARIANTS, FAMILIES),
            ("Variant by sharding", "variant", "sharding", VARIANTS, SHARDINGS),
            ("Family by sharding", "family", "sharding", FAMILIES, SHARDINGS),
        )
    )


HEAD = """\
# The matrix

Written by `make matrix`: {num_cells} cells, {num_bad} of them bad. In each cell a tiny model of a family is
adapted, trained a little, sharded or wrapped, and published. Then

- the published checkpoint has the base's names, shapes and dtypes and, bit for bit, the weights that PEFT's
  `merge_and_unload` makes of a float64 copy of the whole model in one process, rounded once;
- its logits equal the live model's within 1/32 of the largest logit and half of what the adapter moves: that
  is bfloat16's rounding of the merged weights (before it they agree to 1/8192);
- the adapter directory is PEFT's own `save_pretrained`, byte for byte;
- the model in training is untouched.

`ok`: so it is in every cell behind the entry. `merged`: likewise, and published merged only: several adapters
at once make no adapter directory, and the factors of PiSSA and OLoRA fit only what their making left of the
base. `refused`: at the start, with the reason and the way out. `.`: no such cell, or PEFT itself has no such
adapter for the family. Not here: AdaMSS (needs scikit-learn); CorDA, LoftQ and LoRA-GA, which are refused
because they change the base by means that nobody has tried here; prompts, aLoRA, Arrow, layer replication,
quantised bases (refused, see tests/test_exporter_refusals.py).
"""


def _table(
    outcomes: dict[Cell, str], row: str, column: str, rows: Iterable[str], columns: Iterable[str]
) -> str:
    lines = [["", *columns], ["---"] * (1 + len(list(columns)))]
    for name in rows:
        behind = [
            [c for c in outcomes if getattr(c, row) == name and getattr(c, column) == other]
            for other in columns
        ]
        lines.append([name, *(_entry(outcomes, cells) for cells in behind)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _entry(outcomes: dict[Cell, str], cells: list[Cell]) -> str:
    if not cells:
        return ABSENT
    if any(outcomes[cell] for cell in cells):
        return "**BAD**"
    variants = [VARIANTS[cell.variant] for cell in cells]
    if all(variant.refused for variant in variants):
        return REFUSED
    return GOOD if any(variant.publish == "both" for variant in variants) else "merged"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--thin", action="store_true", help="only the cells of the fast suite; writes nothing"
    )
    thin = parser.parse_args().thin
    directory = Path(tempfile.mkdtemp(prefix="weightferry-matrix-"))
    try:
        outcomes = run(thin_cells() if thin else every_cell(), directory, print)
    finally:
        shutil.rmtree(directory)
    text = document(outcomes)
    print(text)
    bad = {cell: outcome for cell, outcome in outcomes.items() if outcome}
    for cell, outcome in bad.items():
        print(f"BAD {cell}: {outcome}", file=sys.stderr)
    if not thin:
        DOCUMENT.write_text(text, encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
