"""A job's settings: what is refused, in one line that helps, with exit code 2; and what --help says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_model import make_tiny_model
from trainer_job import TrainerJob, run_trainer

from weightferry.shared.errors import ConfigError, UnsupportedError
from weightferry.trainer.lora_settings import lora_config, names
from weightferry.trainer.settings_file import load_settings
from weightferry.trainer.settings_words import all_settings

ROOT = Path(__file__).resolve().parent.parent
HELP_BUDGET_S = 0.5


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("trainer-base"))


@pytest.fixture
def job(tmp_path: Path, base: Path) -> TrainerJob:
    return TrainerJob(directory=tmp_path, base=base).write()


def problem_of(job: TrainerJob, *overrides: str, text: str | None = None) -> str:
    if text is not None:
        job.settings.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(job.settings, overrides)
    return str(caught.value)


def test_a_file_is_read_with_what_set_lays_over_it(job: TrainerJob):
    settings = load_settings(job.settings, ["data.batch_size=4", "lora.r=2", "optimizer.betas=[0.5, 0.9]"])
    assert (settings.data.batch_size, settings.data.max_length) == (4, 32)
    assert settings.lora == {"r": 2, "lora_alpha": 16, "target_modules": "all-linear"}
    assert settings.optimizer.betas == (0.5, 0.9)


def test_an_integer_is_taken_where_a_number_is_asked_for(job: TrainerJob):
    assert load_settings(job.settings, ["optimizer.lr=1"]).optimizer.lr == 1.0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.batch_siz=4", "--set data.batch_siz is no setting (did you mean data.batch_size?)"),
        ("batch_size=4", "--set batch_size is no setting (did you mean data.batch_size?)"),
        ("data.batch_size='4'", '--set data.batch_size: a valid integer expected, "4" found'),
        ("data.batch_size=4.0", "--set data.batch_size: a valid integer expected, 4.0 found"),
        ("data.batch_size=0", "--set data.batch_size: greater than 0 expected, 0 found"),
        ("seed=true", "--set seed: a valid integer expected, true found"),
        ("optimizer.lr=nan", "--set optimizer.lr: a finite number expected, NaN found"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1 is missing"),
        ("publish.what='all'", "'merged', 'adapter' or 'both' expected, \"all\" found"),
        ("data=3", "--set data: a table expected, 3 found"),
        ("base.path=3", "--set base.path=3: base is a value, not a table"),
        ("base=/models/x", "a string needs quotes: --set 'base=\"/models/x\"'"),
        ("base", "--set base: key=value expected"),
        ("schedule.num_warmup_steps=13", "at most schedule.num_steps (12) expected, 13 found"),
        ("data.path='missing.jsonl'", "data.path: a file expected, missing.jsonl is none"),
    ],
)
def test_a_wrong_value_is_told_with_what_was_expected_and_found(job: TrainerJob, override: str, words: str):
    problem = problem_of(job, override)
    assert words in problem
    assert "\n" not in problem


def test_a_wrong_key_of_the_file_is_told_with_the_files_name(job: TrainerJob):
    problem = problem_of(job, text=job.settings.read_text() + "evry = 3\n")
    assert problem.startswith(f"{job.settings}: publish.evry is no setting (did you mean publish.every?)")


def test_all_problems_of_a_file_are_told_at_once(job: TrainerJob):
    problem = problem_of(job, text="base = 3\n[data]\nmax_length = 'x'\n")
    for words in (
        "base: a valid string",
        "exchange is missing",
        "data.max_length: a valid integer",
        "1 more",
    ):
        assert words in problem


def test_a_file_that_is_not_toml_is_told_with_the_line(job: TrainerJob):
    assert "line 2" in problem_of(job, text="seed = 3\nbase = models\n")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"rank": 8}, "lora.rank is no field of peft.LoraConfig"),
        ({"lora_alfa": 8}, "did you mean lora_alpha?"),
        ({"r": "8"}, 'lora.r: a valid integer expected, "8" found'),
        ({"target_modules": 3}, "lora.target_modules"),
        ({"task_type": "CAUSAL_LM"}, "lora.task_type is no field"),
        ({"lora_dropout": "high"}, "lora.lora_dropout: a valid number expected"),
    ],
)
def test_a_wrong_lora_field_is_told_with_its_name(table: dict, words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        lora_config(table)


@pytest.mark.parametrize("start", ["pissa", "olora", "pissa_niter_4", "loftq", "eva", 1])
def test_a_start_of_the_adapter_that_changes_the_base_is_refused(start: object):
    with pytest.raises(UnsupportedError, match="init_lora_weights"):
        lora_config({"init_lora_weights": start})


@pytest.mark.parametrize("name", ["eva_config", "layer_replication", "ensure_weight_tying"])
def test_a_lora_field_that_cannot_be_sharded_merged_or_written_in_a_file_is_refused(name: str):
    with pytest.raises(UnsupportedError, match=f"lora.{name} is not supported"):
        lora_config({name: True})


def test_lora_fields_reach_peft_under_their_own_names():
    table = {"r": 4, "lora_alpha": 6, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "lora_dropout": 0.5}
    config = lora_config({**table, "target_modules": ["q_proj", "v_proj"]})
    assert {name: getattr(config, name) for name in table} == table
    assert config.target_modules == {"q_proj", "v_proj"}


def refusal_of(job: TrainerJob, *overrides: str) -> str:
    """The one line on stderr with which the process ends, at exit code 2."""
    return the_one_line(job.run(*overrides))


def the_one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_the_process_ends_with_one_line_and_exit_code_2(job: TrainerJob):
    start = time.monotonic()
    assert "did you mean data.batch_size?" in the_one_line(job.launch("data.batchsize=4"))
    assert "a valid integer expected" in the_one_line(job.launch("data.batch_size='4'"))
    assert "missing.jsonl is none" in the_one_line(job.launch("data.path='missing.jsonl'"))
    assert time.monotonic() - start < 10, "three mistakes that can be known without torch"


def test_a_missing_settings_file_is_told(job: TrainerJob):
    job.settings.unlink()
    assert f"the settings file {job.settings} cannot be read: No such file" in refusal_of(job)


def test_a_base_without_weights_is_told(job: TrainerJob, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert "has no weights" in refusal_of(job, f"base='{tmp_path / 'empty'}'")
    assert "nowhere is not a directory" in refusal_of(job, "base='nowhere'")


def test_a_base_without_a_tokenizer_is_told(job: TrainerJob, base: Path, tmp_path: Path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((base / name).read_bytes())
    assert "bare has no tokenizer" in refusal_of(job, f"base='{bare}'")


def test_the_exchange_of_another_base_is_refused(job: TrainerJob, tmp_path: Path):
    assert job.run("schedule.num_steps=1").returncode == 0
    other = make_tiny_model(tmp_path / "other", seed=1)
    line = refusal_of(job, f"base='{other}'")
    assert f"{job.exchange} is the exchange of another base" in line
    on_ranks = job.launch(f"base='{other}'", num_ranks=2)  # rank 0 alone looks; the others are told
    assert on_ranks.stderr.count("is the exchange of another base") == 1
    assert re.search(r"exitcode *: 2", on_ranks.stderr)


def test_target_modules_that_the_base_lacks_are_told(job: TrainerJob):
    assert "c_attn" in refusal_of(job, "lora.target_modules=['c_attn']")


def test_under_torchrun_the_line_is_told_once_though_every_rank_has_the_error(job: TrainerJob):
    done = job.launch("data.batchsize=4", num_ranks=2)
    assert done.returncode == 1  # torchrun's own code for "a rank failed", whatever the rank's code was
    assert done.stderr.count("did you mean data.batch_size?") == 1
    assert re.search(r"exitcode *: 2", done.stderr)


def test_help_lists_every_setting_in_under_half_a_second_and_without_torch():
    command = [sys.executable, "-m", "weightferry.trainer", "--help"]
    seconds = []
    for _ in range(5):  # the best of a few: the machine may be busy with something else
        start = time.perf_counter()
        done = run_trainer(command)
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0
        assert all(f"  {words.key} = " in done.stdout for words in all_settings())
    assert min(seconds) < HELP_BUDGET_S
    modules = subprocess.run(
        [sys.executable, "-c", "import sys, weightferry.trainer.__main__; print(*sys.modules)"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert not {"torch", "transformers", "peft", "vllm"} & set(modules.stdout.split())


def test_the_document_has_every_setting_in_the_words_of_the_code():
    rows = [
        f"| `{words.key}` | {words.values.replace('|', ' or ')} | {words.default} | {words.sentence} |"
        for words in all_settings()
    ]
    table = "\n".join(["| setting | value | default | meaning |", "|---|---|---|---|", *rows])
    assert table in (ROOT / "docs/trainer.md").read_text(), f"docs/trainer.md must hold:\n{table}"


def test_the_document_names_every_lora_field_that_can_be_set():
    (line,) = re.findall(r"^Fields: (.*)$", (ROOT / "docs/trainer.md").read_text(), re.MULTILINE)
    fields = ", ".join(f"`{name}`" for name in names())
    assert line == f"{fields}."


def test_the_example_trains(job: TrainerJob, base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    places = {"base": base, "exchange": job.exchange, "output_dir": job.directory / "output"}
    overrides = [f"{name}={json.dumps(str(path))}" for name, path in places.items()]
    flags = [word for override in [*overrides, "schedule.num_steps=2"] for word in ("--set", override)]
    done = run_trainer([sys.executable, "-m", "weightferry.trainer", "examples/sft.toml", *flags])
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in job.metrics("publish")] == [2]
