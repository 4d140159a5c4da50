"""The matrix variant x sharding x family: thinned here, its three whole faces with the slow tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix import ABSENT, DOCUMENT, document, every_cell, run, thin_cells
from matrix_cells import Cell
from matrix_families import FAMILIES
from matrix_shardings import SHARDINGS
from matrix_variants import VARIANTS

pytestmark = pytest.mark.ranks


def bad(outcomes: dict[Cell, str]) -> dict[str, str]:
    return {str(cell): outcome for cell, outcome in outcomes.items() if outcome}


def test_every_family_variant_and_sharding_is_published_right_in_some_cell(tmp_path: Path):
    cells = thin_cells()
    assert {cell.family for cell in cells} == set(FAMILIES)
    assert {cell.variant for cell in cells} == set(VARIANTS)
    assert {cell.sharding for cell in cells} == set(SHARDINGS)
    assert bad(run(cells, tmp_path, print)) == {}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_three_faces_of_the_matrix_are_published_right(tmp_path: Path):
    assert bad(run(every_cell(), tmp_path, print)) == {}


def test_the_document_is_of_this_matrix_and_has_no_bad_cell():
    everything_good = dict.fromkeys(every_cell(), "")
    assert DOCUMENT.read_text(encoding="utf-8") == document(everything_good)


def test_a_bad_cell_shows_in_the_document():
    outcomes = dict.fromkeys(every_cell(), "")
    cell = Cell(family="llama", variant="DoRA", sharding="unsharded")
    table = document(outcomes | {cell: "names differ"})
    assert "1 of them bad" in table
    assert table.count("**BAD**") == 3
    assert ABSENT in table
