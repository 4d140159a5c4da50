"""The demo's table says what happened to every version, also to those that no one asked."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from scripted_server import Script, serving
from tiny_exchange import make_base, publish, writing

from weightferry.examples.demo_client import Measurement, PolicyClient
from weightferry.examples.demo_screen import Row, Screen
from weightferry.examples.demo_story import REPLACED, SKIPPED, Story
from weightferry.examples.demo_task import NUM_ASKED, Addition, held_out_questions
from weightferry.shared.errors import WeightferryError
from weightferry.shared.exchange import Exchange

RIGHT = {q.prompt: q.answer for q in held_out_questions()}


@pytest.fixture
def script():
    with serving(Script(answer=RIGHT.__getitem__)) as script:
        yield script


@pytest.fixture
def story(tmp_path, script):
    with PolicyClient(script.url, "a-model") as client:
        yield Story(exchange_path=tmp_path / "exchange", client=client, task=Addition())


def publish_steps(tmp_path, *steps: int) -> list[int]:
    exchange = Exchange.open(tmp_path / "exchange", base=make_base(tmp_path / "base"))
    with writing(exchange) as writer:
        return [publish(writer, step).number for step in steps]


def serve(script: Script, active: int, *applied: int) -> None:
    script.headers["x-weightferry-version"] = str(active)
    script.status |= {"active_version": active} | {
        "applied": [{"number": n, "published_to_served_s": 0.5, "pause_s": 0.05} for n in applied]
    }


def test_before_any_publication_only_the_base_answers(story):
    story.measure_base()
    story.look()
    assert [row.number for row in story.ordered()] == [0]
    assert story.active_row().measurement.score == 1.0


def test_a_server_that_does_not_answer_as_the_base_stops_the_demo(story, script):
    script.headers["x-weightferry-version"] = "3"
    with pytest.raises(WeightferryError, match="not as version 0"):
        story.measure_base()


def test_the_active_version_is_measured_and_the_others_are_accounted_for(tmp_path, story, script):
    passed_over, replaced, active, newest = publish_steps(tmp_path, 10, 20, 30, 40)
    serve(script, active, replaced, active)
    story.look()
    assert story.rows[passed_over].note == SKIPPED
    assert story.rows[replaced].note == REPLACED
    assert story.rows[active].measurement.version == active
    assert story.rows[active].pause_s == 0.05
    assert not story.rows[newest].is_settled
    assert story.newest_row().step == 40


def test_a_version_that_answers_before_the_status_lists_it_is_timed_at_the_next_look(tmp_path, story, script):
    (number,) = publish_steps(tmp_path, 10)
    serve(script, number)
    story.look()
    assert story.rows[number].measurement.version == number
    assert not story.rows[number].is_settled
    serve(script, number, number)
    story.look()
    assert story.rows[number].is_settled
    assert len(script.asked) == NUM_ASKED


def test_a_refused_version_is_shown_with_its_reason(tmp_path, story, script):
    bad, good = publish_steps(tmp_path, 10, 20)
    serve(script, good, good)
    script.status["refused"] = [{"number": bad, "reason": "a shard is missing", "tries": 3}]
    story.look()
    assert story.rows[bad].note == "a shard is missing"


def test_an_active_version_that_the_exchange_does_not_have_is_an_error(story, script):
    serve(script, 7)
    with pytest.raises(WeightferryError, match="version 7 is active"):
        story.look()


def test_without_a_terminal_each_version_is_one_plain_line_and_the_table_comes_last():
    out = io.StringIO()
    rows = [Row(number=0, step=0, note="asked"), Row(number=2, step=10, published_at_s=1.0)]
    with Screen("accuracy", Console(file=out, width=120)) as screen:
        screen.show(rows, "training")
        screen.show(rows, "training")
        assert out.getvalue().splitlines() == ["version base  step 0  accuracy asked"]
        screen.finish(rows)
    assert "published at" in out.getvalue()


def test_on_a_terminal_the_table_is_drawn_live_and_says_what_is_waited_for():
    out = io.StringIO()
    rows = [Row(number=0, step=0), Row(number=2, step=10, measurement=a_half_right_version(2))]
    with Screen("accuracy", Console(file=out, width=120, force_terminal=True)) as screen:
        screen.show(rows, "training")
        screen.finish(rows)
    assert "training" in out.getvalue()
    assert "50.0% " + "█" * 5 in out.getvalue()


def a_half_right_version(number: int) -> Measurement:
    return Measurement(version=number, score=0.5, shown="50.0%", has_bar=True)
