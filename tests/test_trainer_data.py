"""Rows, the tokens that carry the loss, and the order of the rows on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from tiny_model import make_tokenizer
from tokenizers import processors
from trainer_job import write_rows
from transformers import PreTrainedTokenizerFast

from weightferry.shared.errors import ConfigError
from weightferry.trainer.batches import Batches
from weightferry.trainer.dataset import leading_ids, load_examples
from weightferry.trainer.example import NO_LOSS, Example, with_loss_on
from weightferry.trainer.settings import DataSettings

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}~{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As templates that drop the reasoning of all turns but the last do.
FORGETFUL_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if loop.last %}{{ message.content }}{% else %}-{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def load(path: Path, tokenizer: PreTrainedTokenizerFast, **settings) -> list[Example]:
    return load_examples(DataSettings(path=str(path), **settings), tokenizer)


def learned(example: Example, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text whose tokens carry the loss."""
    pairs = zip(example.token_ids, example.labels, strict=True)
    assert all(label in (token, NO_LOSS) for token, label in pairs)
    return str(tokenizer.decode([label for label in example.labels if label != NO_LOSS]))


def text(example: Example, tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.decode(list(example.token_ids)))


def test_only_the_completion_and_its_end_carry_the_loss(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "completion": "2", "id": 7}])
    (example,) = load(path, tokenizer)
    assert text(example, tokenizer) == "1+1=2<eos>"
    assert learned(example, tokenizer) == "2<eos>"
    assert example.num_loss_tokens == 2


def test_the_end_token_can_be_left_out_and_is_never_doubled(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    assert learned(load(path, tokenizer, add_eos=False)[0], tokenizer) == "b"
    path = write_rows(path, [{"prompt": "a", "completion": "b<eos>"}])
    assert learned(load(path, tokenizer)[0], tokenizer) == "b<eos>"


def test_a_beginning_token_stands_before_the_prompt_once(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(ConfigError, match="no beginning-of-sequence token"):
        load(path, tokenizer, add_bos=True)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    assert text(load(path, tokenizer)[0], tokenizer) == "ab<eos>"
    (example,) = load(path, tokenizer, add_bos=True)
    assert text(example, tokenizer) == "<bos>ab<eos>"
    assert learned(example, tokenizer) == "b<eos>"


def test_a_tokenizer_that_adds_its_own_beginning_is_followed(tmp_path, tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos_id = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos_id)]
    )
    assert leading_ids(tokenizer, add_bos=False) == leading_ids(tokenizer, add_bos=True) == [bos_id]
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    (example,) = load(path, tokenizer)
    assert list(example.token_ids[:2]) == tokenizer("a").input_ids
    assert text(example, tokenizer) == "<bos>ab<eos>"


def test_of_a_chat_only_the_assistants_turns_carry_the_loss(tmp_path, tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE
    turns = [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "yo"),
        ("user", "bye"),
        ("assistant", "ok"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    (example,) = load(write_rows(tmp_path / "rows.jsonl", [{"messages": messages}]), tokenizer)
    assert text(example, tokenizer) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert learned(example, tokenizer) == "yo<eos>ok<eos>"


def test_a_chat_whose_turns_cannot_be_told_apart_is_refused(tmp_path, tokenizer):
    tokenizer.chat_template = FORGETFUL_TEMPLATE
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}])
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: message 2: .* renders this turn differently"):
        load(path, tokenizer)


def test_a_chat_needs_a_template(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "assistant", "content": "x"}]}])
    with pytest.raises(ConfigError, match="no chat template"):
        load(path, tokenizer)


def test_parquet_gives_the_same_examples_as_jsonl(tmp_path, tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = [
        {"prompt": "1+1=", "completion": "2", "messages": None},
        {"prompt": None, "completion": None, "messages": chat},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    present = [{name: value for name, value in row.items() if value is not None} for row in rows]
    same = load(write_rows(tmp_path / "rows.jsonl", present), tokenizer)
    assert load(tmp_path / "rows.parquet", tokenizer) == same


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"rows\.jsonl:2 is not JSON"),
        ("[1]", r"rows\.jsonl:2: a JSON object expected, list found"),
        ('{"prompt": "a"}', r"rows\.jsonl:2 has no `completion`: .* prompt found"),
        ('{"prompt": 3, "completion": "b"}', r"rows\.jsonl:2: `prompt` must be a string, int found"),
        ('{"prompt": "abcdefgh", "completion": "b"}', r"rows\.jsonl:2: nothing to learn in its first 8"),
        ('{"messages": "hi"}', r"rows\.jsonl:2: `messages` must be a list"),
        ('{"messages": [{"role": "user"}]}', r"rows\.jsonl:2: message 1: `content` must be a string"),
        ('{"messages": [{"role": "user", "content": "a"}]}', r"rows\.jsonl:2: no message is the assistant's"),
    ],
)
def test_a_bad_row_is_told_with_its_file_and_line(tmp_path, tokenizer, line: str, words: str):
    tokenizer.chat_template = CHAT_TEMPLATE
    good = json.dumps({"prompt": "a", "completion": "b"})
    (tmp_path / "rows.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ConfigError, match=words):
        load(tmp_path / "rows.jsonl", tokenizer, max_length=8)


def test_a_bad_row_of_a_parquet_file_is_told_with_its_number(tmp_path, tokenizer):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet: row 2 has no `completion`"):
        load(tmp_path / "rows.parquet", tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.jsonl", b"\n", "has no rows"),
        ("rows.csv", b"a,b\n", "must end in .jsonl or .parquet"),
        ("rows.parquet", b"PAR1", "is not a parquet file"),
    ],
)
def test_a_file_that_holds_no_rows_is_told(tmp_path, tokenizer, name: str, content: bytes, words: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path / name, tokenizer)


def test_a_long_row_is_cut_at_its_end_and_says_so(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cdefgh"}])
    (example,) = load(path, tokenizer, max_length=5)
    assert text(example, tokenizer) == "abcde"
    assert learned(example, tokenizer) == "cde"
    assert example.is_cut


def batches(num_rows: int = 10, batch_size: int = 4, **changes) -> Batches:
    """Row i is i+2 tokens, the first of them i; all but the first carry the loss."""
    examples = [with_loss_on([row] * (row + 2), [range(1, row + 2)]) for row in range(num_rows)]
    settings = {"micro_batch_size": None, "seed": 0, "pad_id": 99, **changes}
    return Batches(examples=examples, batch_size=batch_size, **settings)


def rows_with_loss(job: Batches, step: int, rank: int, world_size: int) -> list[int]:
    return [
        int(ids_T[0])
        for micro_batch in job.share(step, rank=rank, world_size=world_size).micro_batches
        for ids_T, labels_T in zip(micro_batch.input_ids_BT, micro_batch.labels_BT, strict=True)
        if (labels_T != NO_LOSS).any()
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
def test_a_step_takes_the_same_rows_on_any_number_of_ranks(world_size: int, micro_batch_size: int | None):
    job = batches(micro_batch_size=micro_batch_size)
    for step in range(1, 9):
        shared = [rows_with_loss(job, step, rank, world_size) for rank in range(world_size)]
        assert sorted(row for rows in shared for row in rows) == sorted(job.rows(step))


@pytest.mark.parametrize("micro_batch_size", [None, 1, 2])
def test_every_rank_takes_the_same_number_of_micro_batches_and_counts_the_whole_step(
    micro_batch_size: int | None,
):
    job = batches(batch_size=5, micro_batch_size=micro_batch_size)
    shares = [job.share(2, rank=rank, world_size=3) for rank in range(3)]
    assert len({len(share.micro_batches) for share in shares}) == 1
    assert {share.num_tokens for share in shares} == {sum(row + 2 for row in job.rows(2))}
    assert {share.num_loss_tokens for share in shares} == {sum(row + 1 for row in job.rows(2))}


def test_every_row_comes_once_a_pass_and_the_next_pass_has_another_order():
    job = batches(num_rows=10, batch_size=5)
    first, second = (job.rows(step) + job.rows(step + 1) for step in (1, 3))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_the_order_depends_on_the_seed_and_on_nothing_that_ran_before():
    assert batches(seed=1).rows(7) == batches(seed=1).rows(7)
    assert [batches(seed=1).rows(step) for step in range(1, 4)] != [
        batches().rows(step) for step in range(1, 4)
    ]


def test_padding_is_masked_and_carries_no_loss():
    job = batches(num_rows=4, batch_size=4)
    ((micro_batch,), _) = (job.share(1, rank=0, world_size=1).micro_batches, None)
    is_padding = micro_batch.input_ids_BT == 99
    assert is_padding.any()
    assert (micro_batch.attention_mask_BT == ~is_padding).all()
    assert (micro_batch.labels_BT[is_padding] == NO_LOSS).all()
