"""Which rank merges and writes which unit: pure, and the same on every rank.

Units go in rounds of at most one for each rank, the largest first: a round's units are of like size, so ranks
end together, and a rank holds one unit's whole tensors at a time. Called by the publisher.
"""

from __future__ import annotations

from collections.abc import Sequence

Round = list[tuple[int, int]]


def deal(sizes: Sequence[int], num_ranks: int) -> list[Round]:
    """Rounds of (unit's index, rank); within a round the largest goes to the rank with the least so far."""
    order = sorted(range(len(sizes)), key=lambda unit: (-sizes[unit], unit))
    loads = [0] * num_ranks
    rounds: list[Round] = []
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (loads[rank], rank))
        dealt = list(zip(order[start : start + num_ranks], ranks, strict=False))
        for unit, rank in dealt:
            loads[rank] += sizes[unit]
        rounds.append(dealt)
    return rounds
