"""One training example: tokens, and for each the label that the loss compares with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NO_LOSS = -100  # transformers' and torch's label for "not counted" (cross_entropy's ignore_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Tokens of one row; `labels` has their length and is NO_LOSS where nothing is to be learned."""

    token_ids: tuple[int, ...]
    labels: tuple[int, ...]
    is_cut: bool = False

    @property
    def num_loss_tokens(self) -> int:
        """How many tokens are predicted: the first one never is, for nothing stands before it."""
        return sum(label != NO_LOSS for label in self.labels[1:])

    def cut(self, max_length: int) -> Example:
        """The first `max_length` tokens."""
        if len(self.token_ids) <= max_length:
            return self
        return Example(token_ids=self.token_ids[:max_length], labels=self.labels[:max_length], is_cut=True)

    def without_loss(self) -> Example:
        """The same tokens with nothing to learn: it fills a rank's share up."""
        return Example(token_ids=self.token_ids, labels=(NO_LOSS,) * len(self.labels))


def with_loss_on(token_ids: Sequence[int], spans: Iterable[range]) -> Example:
    """An example whose tokens at these positions are to be learned."""
    learned = {position for span in spans for position in span}
    labels = (token if position in learned else NO_LOSS for position, token in enumerate(token_ids))
    return Example(token_ids=tuple(token_ids), labels=tuple(labels))
