"""The rows of a data file, and each row as tokens of which some carry the loss.

A row is `prompt` and `completion`, or chat `messages`; other columns are left alone. Invariant: an `Example`
has at least one token with a loss, and only tokens of the completion or of the assistant's turns have one.
The prompt's tokens are those that a server makes of the same prompt. A bad row is a ConfigError that names
file and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..shared.errors import BaseCheckpointError, ConfigError
from .chat import chat_example
from .example import Example, with_loss_on
from .settings import DataSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row as the file has it; `where` is its file and line."""

    where: str
    columns: dict[str, Any]


def load_examples(settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Every row of the data file as tokens, cut to `max_length`."""
    examples = [_example(row, settings, tokenizer) for row in read_rows(Path(settings.path))]
    if not examples:
        raise ConfigError(f"{settings.path} has no rows; data.path must name a file with at least one")
    return examples


def check_vocabulary(examples: Sequence[Example], num_embeddings: int) -> None:
    """Refuse a tokenizer that knows tokens which the model does not."""
    largest = max(max(example.token_ids) for example in examples)
    if largest >= num_embeddings:
        raise BaseCheckpointError(
            f"the base's tokenizer makes token {largest} of these rows, and its model knows {num_embeddings} "
            "tokens; put the tokenizer and the model of one checkpoint together"
        )


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a .jsonl or .parquet file."""
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    raise ConfigError(f"{path}: data.path must end in .jsonl or .parquet; rename or convert the file")


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                columns = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{where} is not JSON: {error}; one row a line is expected") from None
            if not isinstance(columns, dict):
                raise ConfigError(f"{where}: a JSON object expected, {type(columns).__name__} found")
            yield Row(where=where, columns=columns)


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(f"{path}: reading parquet needs pyarrow; `pip install pyarrow`") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for columns in batch.to_pylist():
                    number += 1
                    present = {name: value for name, value in columns.items() if value is not None}
                    yield Row(where=f"{path}: row {number}", columns=present)
    except ArrowException as error:
        raise ConfigError(f"{path} is not a parquet file: {error}; is it whole?") from None


def _example(row: Row, settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> Example:
    if "messages" in row.columns:
        example = chat_example(row.where, row.columns["messages"], tokenizer)
    else:
        prompt, completion = (_text(row, column) for column in ("prompt", "completion"))
        example = _completion_example(prompt, completion, settings, tokenizer)
    cut = example.cut(settings.max_length)
    if not cut.num_loss_tokens:
        raise ConfigError(
            f"{row.where}: nothing to learn in its first {settings.max_length} tokens, of "
            f"{len(example.token_ids)}; raise data.max_length, or take the row out"
        )
    return cut


def _text(row: Row, column: str) -> str:
    value = row.columns.get(column)
    if value is None:
        found = ", ".join(row.columns) or "none"
        raise ConfigError(
            f"{row.where} has no `{column}`: `prompt` and `completion`, or `messages` expected, "
            f"{found} found; add it, or take the row out"
        )
    if not isinstance(value, str):
        raise ConfigError(f"{row.where}: `{column}` must be a string, {type(value).__name__} found")
    return value


def _completion_example(
    prompt: str, completion: str, settings: DataSettings, tokenizer: PreTrainedTokenizerBase
) -> Example:
    prompt_ids = _plain(tokenizer, prompt)
    # A token across the seam would change the prompt that a server sees: then encode the two parts apart.
    joint_ids = _plain(tokenizer, prompt + completion)
    is_prefix = joint_ids[: len(prompt_ids)] == prompt_ids
    completion_ids = joint_ids[len(prompt_ids) :] if is_prefix else _plain(tokenizer, completion)
    eos_id = tokenizer.eos_token_id
    if settings.add_eos and isinstance(eos_id, int) and completion_ids[-1:] != [eos_id]:
        completion_ids = [*completion_ids, eos_id]
    start_ids = leading_ids(tokenizer, add_bos=settings.add_bos)
    num_prompt = len(start_ids) + len(prompt_ids)
    token_ids = [*start_ids, *prompt_ids, *completion_ids]
    return with_loss_on(token_ids, [range(num_prompt, len(token_ids))])


def leading_ids(tokenizer: PreTrainedTokenizerBase, *, add_bos: bool) -> list[int]:
    """What stands before every prompt: the tokenizer's own start, and <bos> if asked for and not in it."""
    whole, plain = list(tokenizer("a").input_ids), _plain(tokenizer, "a")
    start = whole[: _position(plain, whole)]
    bos_id = tokenizer.bos_token_id
    if not add_bos or bos_id in start:
        return start
    if not isinstance(bos_id, int):
        raise ConfigError(
            "data.add_bos: this base's tokenizer has no beginning-of-sequence token; take it out"
        )
    return [bos_id, *start]


def _position(part: Sequence[int], whole: Sequence[int]) -> int:
    starts = range(len(whole) - len(part) + 1)
    return next((start for start in starts if list(whole[start : start + len(part)]) == list(part)), 0)


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)
