"""The trainer as people start it, on real torchrun ranks: it learns, publishes, stops, and dies whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import make_tiny_model
from trainer_job import TrainerJob, children_of, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.exchange import Exchange
from weightferry.shared.signing import load_checking_key
from weightferry.shared.verify import verify_exchange
from weightferry.trainer.batches import Batches
from weightferry.trainer.dataset import load_examples
from weightferry.trainer.lora_settings import lora_config
from weightferry.trainer.model import load_policy
from weightferry.trainer.settings import ModelSettings
from weightferry.trainer.settings_file import load_settings
from weightferry.trainer.stop import SAME_REQUEST_S

pytestmark = pytest.mark.ranks

ENDLESS = ("schedule.num_steps=1000000", "publish.every=1000000")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("trainer-base"))


@pytest.fixture
def job(tmp_path: Path, base: Path) -> TrainerJob:
    return TrainerJob(directory=tmp_path, base=base).write()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base: Path) -> TrainerJob:
    """A job of two ranks that ran to its end."""
    job = TrainerJob(directory=tmp_path_factory.mktemp("finished"), base=base).write()
    done = job.launch("publish.at_start=true", num_ranks=2)
    assert done.returncode == 0, done.stderr
    return job


def test_the_loss_falls(finished: TrainerJob):
    losses = [record["loss"] for record in finished.metrics("step")]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 3


def test_a_version_is_published_at_the_start_every_n_steps_and_at_the_end(finished: TrainerJob):
    exchange = Exchange.open(finished.exchange)
    assert [version.step for version in exchange.versions()] == [0, 5, 10, 12]
    assert verify_exchange(exchange) == []


def test_the_metrics_tell_every_step_and_every_publication(finished: TrainerJob):
    steps, published = finished.metrics("step"), finished.metrics("publish")
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert {record["lr"] for record in steps} == {0.01}
    for record in steps:
        assert record["grad_norm"] > 0
        assert record["tokens"] > record["loss_tokens"] > 8
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["seconds"])
    versions = Exchange.open(finished.exchange).versions()
    assert [(r["version"], r["step"], r["run_id"]) for r in published] == [
        (version.number, version.step, version.run_id) for version in versions
    ]
    assert [record["bytes"] for record in published] == [v.manifest.changed_bytes for v in versions]
    assert versions[-1].manifest.metrics == {"loss": steps[-1]["loss"]}


def test_the_settings_are_written_beside_the_metrics(finished: TrainerJob):
    settings = json.loads((finished.directory / "output" / "settings.json").read_text())
    assert settings["publish"] == {
        "every": 5, "what": "both", "at_start": True, "deadline_s": 600.0,
        "keep": None, "keep_every": None, "signing_key": None,
    }  # fmt: skip
    assert settings["lora"]["r"] == 8


def test_every_version_loads_as_a_checkpoint_and_only_the_first_is_the_base(finished: TrainerJob, base: Path):
    original = load_file(base / "model.safetensors")
    for version in Exchange.open(finished.exchange).versions():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            version.path, dtype=torch.bfloat16, output_loading_info=True
        )
        model, info = loaded
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        same = [torch.equal(tensor, original[name]) for name, tensor in model.state_dict().items()]
        assert all(same) == (version.step == 0)


def test_old_versions_go_and_the_others_are_signed_where_the_settings_say_so(job: TrainerJob, tmp_path: Path):
    key_file = tmp_path / "key"
    key_file.write_bytes(bytes(range(65, 105)))
    done = job.run(
        "publish.keep=1", "publish.keep_every=10", f"publish.signing_key={json.dumps(str(key_file))}"
    )
    assert done.returncode == 0, done.stderr
    exchange = Exchange.open(job.exchange, require_signature=load_checking_key(key_file))
    assert [version.step for version in exchange.versions()] == [10, 12]
    assert [version.manifest.step for version in exchange.versions()] == [
        10,
        12,
    ]  # reading checks the signature


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("publish.keep_every=10", "keep_every must be 1 or more, and means something only beside keep"),
        ('publish.signing_key="/nowhere/key"', "the key /nowhere/key cannot be read"),
    ],
)
def test_a_wrong_choice_about_versions_is_said_before_the_model_is_loaded(job: TrainerJob, override, words):
    done = job.run(override)
    assert done.returncode == 2
    assert words in done.stderr
    assert not job.exchange.exists()


def test_another_number_of_ranks_trains_the_same(job: TrainerJob, tmp_path: Path, base: Path):
    # Five rows on two ranks, in parts of two: one rank has a part that only fills up.
    same = ("model.dtype='float32'", "data.batch_size=5", "data.micro_batch_size=1", "schedule.num_steps=4")
    (tmp_path / "other").mkdir()
    other = TrainerJob(directory=tmp_path / "other", base=base).write()
    assert job.run(*same).returncode == 0
    assert other.run(*same, num_ranks=2).returncode == 0
    one, two = job.metrics("step"), other.metrics("step")
    for key in ("loss", "grad_norm", "tokens", "loss_tokens"):
        assert [record[key] for record in two] == pytest.approx([record[key] for record in one], rel=1e-5)
    assert len({record["loss"] for record in one}) == 4


def test_micro_batches_change_the_memory_and_not_the_result(job: TrainerJob, tmp_path: Path, base: Path):
    same = ("model.dtype='float32'", "schedule.num_steps=3")
    (tmp_path / "other").mkdir()
    other = TrainerJob(directory=tmp_path / "other", base=base).write()
    assert job.run(*same).returncode == 0
    assert other.run(*same, "data.micro_batch_size=3", "model.activation_checkpointing=true").returncode == 0
    for one, two in zip(job.metrics("step"), other.metrics("step"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def plain_losses(job: TrainerJob, num_steps: int) -> list[float]:
    """What a loop as short as it can be gives from the same rows and start, with transformers' own loss."""
    settings = load_settings(job.settings)
    tokenizer = AutoTokenizer.from_pretrained(job.base)
    examples = load_examples(settings.data, tokenizer)
    batches = Batches(examples=examples, batch_size=8, micro_batch_size=None, seed=settings.seed, pad_id=0)
    model_settings = ModelSettings(dtype="float32")
    policy = load_policy(
        Checkpoint.open(job.base), model_settings, lora_config(settings.lora), seed=settings.seed
    )
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0)
    losses = []
    for step in range(1, num_steps + 1):
        (batch,) = batches.share(step, rank=0, world_size=1).micro_batches
        loss = policy(
            input_ids=batch.input_ids_BT, attention_mask=batch.attention_mask_BT, labels=batch.labels_BT
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_losses_are_those_of_a_plain_loop_on_an_unsharded_model(job: TrainerJob):
    assert job.run("model.dtype='float32'", "schedule.num_steps=4").returncode == 0
    losses = [record["loss"] for record in job.metrics("step")]
    assert losses == pytest.approx(plain_losses(job, 4), rel=1e-4)


def last_published_step(job: TrainerJob) -> int:
    latest = Exchange.open(job.exchange).latest()
    assert latest is not None
    return latest.step


def test_a_stop_signal_to_one_rank_ends_all_with_a_last_version_and_exit_code_0(job: TrainerJob):
    with job.started(*ENDLESS, num_ranks=2) as process:
        wait_for(lambda: len(job.metrics("step")) > 2, "the third step")
        os.kill(children_of(process.pid)[1], signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert last_published_step(job) == job.metrics("step")[-1]["step"] > 2
    assert "stopped by a signal after step" in output


def test_a_stop_signal_to_torchrun_reaches_the_ranks_and_the_last_version_is_published(job: TrainerJob):
    with job.started(*ENDLESS, num_ranks=2) as process:
        wait_for(lambda: len(job.metrics("step")) > 2, "the third step")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert last_published_step(job) == job.metrics("step")[-1]["step"], output


def test_one_request_that_arrives_twice_within_a_moment_is_one():
    code = (
        "import os, signal\n"
        "from weightferry.trainer.stop import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):\n"
        "        os.kill(os.getpid(), number)\n"
        "    print(stop.is_requested)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_a_second_stop_signal_ends_at_once_without_a_version(job: TrainerJob):
    # One step takes far longer than the test: the first signal cannot be obeyed before the second comes.
    with job.started(*ENDLESS, "data.batch_size=200000", "data.micro_batch_size=1") as process:
        wait_for(lambda: (job.exchange / "writer.json").exists(), "the start of training")
        time.sleep(SAME_REQUEST_S)  # until the handlers are there: they are set before the writer appears
        process.send_signal(signal.SIGTERM)
        time.sleep(SAME_REQUEST_S + 0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert "a second SIGTERM: ending now" in output
    assert Exchange.open(job.exchange).latest() is None


def test_when_a_rank_is_killed_the_whole_job_ends(job: TrainerJob):
    with job.started(*ENDLESS, num_ranks=2) as process:
        wait_for(lambda: len(job.metrics("step")) > 0, "the first step")
        ranks = children_of(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        process.communicate(timeout=90)
    assert process.returncode == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_after_a_kill_in_the_middle_of_a_publication_the_next_run_publishes(job: TrainerJob):
    done = job.launch(num_ranks=2, kill_at="after-shard:1")
    assert done.returncode == 1
    assert Exchange.open(job.exchange).latest() is None
    assert job.run(num_ranks=2).returncode == 0
    exchange = Exchange.open(job.exchange)
    assert [version.step for version in exchange.versions()] == [5, 10, 12]
    assert verify_exchange(exchange) == []


def test_a_loss_that_is_no_number_ends_the_job_and_is_never_published(job: TrainerJob):
    done = job.run("optimizer.lr=1e30", "optimizer.max_grad_norm=1e30")
    assert done.returncode == 1
    assert "training diverged" in done.stderr
    (line,) = done.stderr.splitlines()
    latest = Exchange.open(job.exchange).latest()
    assert latest is None, line
