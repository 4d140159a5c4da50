"""The demo measures over HTTP, and only what names its version."""

from __future__ import annotations

import pytest
from scripted_server import Script, serving

from weightferry.examples.demo_client import Measurement, PolicyClient
from weightferry.examples.demo_task import Addition, held_out_questions, question, training_questions
from weightferry.shared.errors import WeightferryError

RIGHT = {q.prompt: q.answer for q in held_out_questions()}


@pytest.fixture
def script():
    with serving(Script(answer=RIGHT.__getitem__)) as script:
        yield script


def measured(script: Script) -> Measurement | None:
    with PolicyClient(script.url, "a-model") as client:
        return Addition().measure(client)


def test_the_answer_is_the_sum_last_digit_first():
    assert question(7, 45).prompt == "07+45="
    assert question(7, 45).answer == "250"
    assert question(99, 99).answer == "891"


def test_no_question_that_is_asked_was_trained_on():
    assert not set(training_questions()) & set(held_out_questions())
    assert len(training_questions()) == 9000


def test_accuracy_is_the_share_of_exact_answers(script):
    script.headers["x-weightferry-version"] = "5"
    wrong = {q.prompt for q in held_out_questions()[:200:4]}
    script.answer = lambda prompt: "000" if prompt in wrong else RIGHT[prompt]
    measurement = measured(script)
    assert measurement is not None
    assert (measurement.version, measurement.score) == (5, 0.75)
    assert len(set(script.asked)) == 200


def test_answers_of_two_versions_are_not_a_measurement(script):
    script.headers |= {"x-weightferry-version": "6", "x-weightferry-version-start": "5"}
    assert measured(script) is None


def test_an_answer_without_a_version_is_an_error(script):
    script.headers.clear()
    with pytest.raises(WeightferryError, match="names no version"):
        measured(script)


def test_a_server_that_is_gone_is_named_and_not_waited_for():
    with PolicyClient("http://127.0.0.1:9", "a-model") as client:
        assert client.status() is None
        with pytest.raises(WeightferryError, match="did not answer /v1/completions"):
            client.complete_all([["07+45="]], max_tokens=4)


@pytest.mark.parametrize(("last", "is_enough"), [(0.51, True), (0.49, False)])
def test_a_run_counts_only_if_accuracy_rose_clearly(last, is_enough):
    base = Measurement(version=0, score=0.35, shown="35 %")
    objection = Addition().objection(base, Measurement(version=9, score=last, shown="..."))
    assert (objection is None) == is_enough
