"""Which rows a step takes, and a rank's share of them as tensors.

Invariant: the rows of step n depend on the seed, the number of rows and the batch size only, never on the
number of ranks or on what ran before: every rank computes the whole step and takes its share. Every rank
takes the same number of micro batches, because each one is a collective under FSDP; shares that are short
are filled up with rows without a loss. Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np
import torch

from .example import NO_LOSS, Example


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that go through the model at once, padded on the right."""

    input_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor
    labels_BT: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank does in one step; the token counts are of all ranks together."""

    micro_batches: tuple[MicroBatch, ...]
    num_tokens: int
    num_loss_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The steps of a job over its examples."""

    examples: Sequence[Example]
    batch_size: int
    micro_batch_size: int | None
    seed: int
    pad_id: int

    def rows(self, step: int) -> list[int]:
        """The rows of step 1, 2, ... of the whole job: one shuffled pass over the data after another."""
        first = (step - 1) * self.batch_size
        return [self._row(position) for position in range(first, first + self.batch_size)]

    def share(self, step: int, *, rank: int, world_size: int) -> Share:
        """This rank's part of a step."""
        whole = [self.examples[row] for row in self.rows(step)]
        mine = whole[rank::world_size]
        largest_share = ceil(len(whole) / world_size)
        mine += [whole[0].without_loss()] * (largest_share - len(mine))
        size = self.micro_batch_size or largest_share
        return Share(
            micro_batches=tuple(
                self._collate(mine[start : start + size]) for start in range(0, largest_share, size)
            ),
            num_tokens=sum(len(example.token_ids) for example in whole),
            num_loss_tokens=sum(example.num_loss_tokens for example in whole),
        )

    def _row(self, position: int) -> int:
        num_pass, place = divmod(position, len(self.examples))
        return int(_order(self.seed, num_pass, len(self.examples))[place])

    def _collate(self, examples: Sequence[Example]) -> MicroBatch:
        length = max(len(example.token_ids) for example in examples)
        missing = [length - len(example.token_ids) for example in examples]
        rows = list(zip(examples, missing, strict=True))
        return MicroBatch(
            input_ids_BT=torch.tensor([[*row.token_ids, *[self.pad_id] * pad] for row, pad in rows]),
            attention_mask_BT=torch.tensor([[1] * len(row.token_ids) + [0] * pad for row, pad in rows]),
            labels_BT=torch.tensor([[*row.labels, *[NO_LOSS] * pad] for row, pad in rows]),
        )


@lru_cache(maxsize=2)  # a batch touches at most the end of one pass and the start of the next, mostly
def _order(seed: int, num_pass: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng((seed, num_pass)).permutation(num_rows)
