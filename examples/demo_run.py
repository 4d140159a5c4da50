"""One run of the demo, from the base to the verdict; `weightferry demo` calls it.

A run has its own numbered directory below the demo's: settings, exchange, logs. Nothing of an earlier run is
touched, and nothing of this one is removed, so that it can be inspected afterwards.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from pathlib import Path

from ..shared.errors import ConfigError, WeightferryError
from ..shared.exchange import Exchange
from ..shared.verify import verify_version
from .demo_client import PolicyClient
from .demo_jobs import Job, ServerPlan, TrainerPlan, free_port
from .demo_screen import Screen
from .demo_story import Story, Task
from .demo_subject import Subject, make_subject

NUM_RANKS = 2
SERVER_START_DEADLINE_S = 300.0
LAST_VERSION_DEADLINE_S = 120.0
LOOK_EVERY_S = 0.2


def run_demo(args: argparse.Namespace) -> None:
    """Run it and show it; raises when a check does not hold."""
    _check_counts(args)
    started = time.monotonic()
    directory = args.dir.absolute()
    subject = make_subject(args, directory)
    run_directory = _new_run_directory(directory)
    server = _server_plan(subject, args, run_directory)
    trainer = _write_trainer_plan(subject, run_directory)
    with Screen(subject.task.headline) as screen, server.start() as server_job:
        screen.say(subject.task.introduction)
        screen.say(f"server: {server.url} (log: {server.log})")
        with PolicyClient(server.url, str(server.base)) as client:
            _wait_for_server(server_job, client)
            story = Story(exchange_path=server.exchange, client=client, task=subject.task)
            story.measure_base()
            with trainer.start() as trainer_job:
                screen.say(f"trainer: torchrun with {NUM_RANKS} ranks (log: {trainer.log})")
                _follow(story, screen, server_job, trainer_job, subject.training_deadline_s)
        screen.finish(story.ordered())
    _judge(story, subject.task)
    screen.say(_farewell(server.exchange, story.newest_row().number, time.monotonic() - started))


def _check_counts(args: argparse.Namespace) -> None:
    for flag, count in (("--steps", args.steps), ("--publish-every", args.publish_every)):
        if count is not None and count < 1:
            raise ConfigError(f"{flag} must be at least 1, {count} found")


def _new_run_directory(directory: Path) -> Path:
    """`run-001`, `run-002`, ...: the first that does not exist."""
    for number in range(1, 1000):
        with suppress(FileExistsError):
            path = directory / f"run-{number:03d}"
            path.mkdir(parents=True)
            return path
    raise ConfigError(f"{directory} holds 999 runs; remove some, or give another --dir")


def _server_plan(subject: Subject, args: argparse.Namespace, run_directory: Path) -> ServerPlan:
    return ServerPlan(
        base=subject.base,
        exchange=run_directory / "exchange",
        cache=run_directory / "server-cache",
        apply=args.apply,
        port=args.port or free_port(),
        log=run_directory / "server.log",
        max_model_len=subject.max_model_len,
        kv_cache_bytes=subject.kv_cache_bytes,
        max_lora_rank=subject.lora_rank,
    )


def _write_trainer_plan(subject: Subject, run_directory: Path) -> TrainerPlan:
    """Write the trainer's data and settings file."""
    data, settings = run_directory / "rows.jsonl", run_directory / "trainer.toml"
    subject.task.write_rows(data)
    settings.write_text(_settings(subject, data, run_directory))
    return TrainerPlan(settings=settings, log=run_directory / "trainer.log", num_ranks=NUM_RANKS)


def _settings(subject: Subject, data: Path, run_directory: Path) -> str:
    # JSON strings are TOML strings
    return f"""\
base = {json.dumps(str(subject.base))}
exchange = {json.dumps(str(run_directory / "exchange"))}
output_dir = {json.dumps(str(run_directory / "trainer"))}
seed = 0

[model]
dtype = "float32"

[data]
path = {json.dumps(str(data))}
max_length = {subject.max_length}
batch_size = {subject.batch_size}

[lora]
r = {subject.lora_rank}
lora_alpha = {subject.lora_alpha}
target_modules = "all-linear"

[optimizer]
lr = {subject.learning_rate}

[schedule]
num_steps = {subject.num_steps}
kind = "linear"

[publish]
every = {subject.publish_every}
what = "both"
"""


def _wait_for_server(job: Job, client: PolicyClient) -> None:
    def is_serving() -> bool:
        status = client.status()
        return status is not None and status["state"] == "serving"

    job.wait_until(is_serving, what="it served the base", deadline_s=SERVER_START_DEADLINE_S)


def _follow(story: Story, screen: Screen, server: Job, trainer: Job, training_deadline_s: float) -> None:
    """Show the story until the trainer is done and its last version has answered."""
    deadline = time.monotonic() + training_deadline_s
    while trainer.exit_code() is None:
        _look(story, screen, server, trainer, "training")
        if time.monotonic() > deadline:
            raise trainer.failure(f"did not end within {training_deadline_s:.0f} s")
    deadline = time.monotonic() + LAST_VERSION_DEADLINE_S
    _look(story, screen, server, trainer, "waiting for the last version")
    while not _last_has_answered(story):
        _look(story, screen, server, trainer, "waiting for the last version")
        if time.monotonic() > deadline:
            raise server.failure(_why_not_served(story))


def _look(story: Story, screen: Screen, server: Job, trainer: Job, state: str) -> None:
    if server.exit_code() is not None:
        raise server.failure(f"ended with exit code {server.exit_code()}")
    trainer.require_running_or_done()
    story.look()
    screen.show(story.ordered(), state)
    time.sleep(LOOK_EVERY_S)


def _last_has_answered(story: Story) -> bool:
    return story.newest_row() == story.active_row() and story.newest_row().is_settled


def _why_not_served(story: Story) -> str:
    newest, active = story.newest_row().number, story.status.get("active_version")
    reason = story.refusal(newest) or "it gives no reason"
    return f"still serves version {active} and not {newest} after {LAST_VERSION_DEADLINE_S:.0f} s: {reason}"


def _judge(story: Story, task: Task) -> None:
    """Raise unless the last version was taught something and its files are whole."""
    base, last = story.rows[0].measurement, story.newest_row().measurement
    if base is None or last is None or story.newest_row().number == 0:
        raise WeightferryError("nothing was published")
    if objection := task.objection(base, last):
        raise WeightferryError(objection)
    if findings := verify_version(Exchange.open(story.exchange_path).version(last.version)):
        raise WeightferryError(f"version {last.version} is served but not whole: {findings[0]}")


def _farewell(exchange: Path, last: int, elapsed_s: float) -> str:
    return f"""
Done in {elapsed_s:.0f} s. The exchange stays for inspection; try:
  weightferry ls {exchange}
  weightferry show {exchange} {last}
  weightferry verify {exchange} {last}"""
