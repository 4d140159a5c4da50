"""A base that is made once and kept: `DIRECTORY/checkpoint`, beside the recipe that it was made by.

Invariant: `recipe.json` is written last, so a base whose making was cut short has none and is made anew, as
is one that was made by another recipe.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..shared import durable

RECIPE_NAME = "recipe.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBase:
    """One place for one base; `recipe` is everything that decides its weights."""

    directory: Path
    recipe: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        """The Hugging Face checkpoint directory."""
        return self.directory / "checkpoint"

    def is_made(self) -> bool:
        """Whether it is whole, and of this recipe."""
        recipe = durable.read_fresh(self.directory / RECIPE_NAME) if self.directory.is_dir() else None
        return recipe is not None and json.loads(recipe) == self.recipe

    def clear(self) -> None:
        """Make room for it."""
        durable.remove_tree(self.directory)
        self.checkpoint.mkdir(parents=True)

    def seal(self) -> None:
        """Say that it is whole."""
        durable.create_exclusive(self.directory / RECIPE_NAME, json.dumps(self.recipe, indent=1).encode())
