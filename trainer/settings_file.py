"""Reading the settings: a TOML file, then `--set key=value` over it, checked whole.

Every problem is one ConfigError in one line that names the file or the flag, the key, what was expected and
found, and what to do. Needs neither torch nor transformers, so that a mistake is told at once.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..shared.errors import ConfigError
from .settings import SETTINGS, Settings
from .settings_words import all_settings

_MOST_PROBLEMS = 5


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a file, with `key=value` texts laid over it; ConfigError names what is wrong."""
    table = _read_toml(Path(path))
    overridden = {_override(table, text) for text in overrides}
    try:
        # By way of JSON: strict JSON takes a list for a tuple and an integer for a float, as TOML means them.
        settings = SETTINGS.validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise ConfigError(_explain(error, path, overridden)) from None
    _check_together(settings, path)
    return settings


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the settings file {path} cannot be read: {error.strerror}; give the path of a TOML file"
        ) from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{path} is not TOML: {error}; strings need quotes, tables [brackets]") from None


def _override(table: dict[str, Any], text: str) -> str:
    """Set one `key=value` in the table; returns the key."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set {text}: key=value expected, as in --set data.batch_size=4")
    *tables, name = key.split(".")
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text}: {part} is a value, not a table; --help lists every setting")
    try:
        table[name] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"--set {text}: {value!r} is not a TOML value; a string needs quotes: --set '{key}=\"{value}\"'"
        ) from None
    return key


def _explain(error: ValidationError, path: str | Path, overridden: set[str]) -> str:
    problems = error.errors(include_url=False, include_context=False)
    told = [_explain_one(problem, path, overridden) for problem in problems[:_MOST_PROBLEMS]]
    more = len(problems) - len(told)
    return "; ".join(told) + (f"; and {more} more" if more else "") + "; --help lists every setting"


def _explain_one(problem: ErrorDetails, path: str | Path, overridden: set[str]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    where = f"--set {key}" if key in overridden else f"{path}: {key}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] == "unexpected_keyword_argument":
        return f"{where} is no setting{did_you_mean(key, [words.key for words in all_settings()])}"
    expected = problem["msg"].removeprefix("Input should be ").replace("an object", "a table")
    return f"{where}: {expected} expected, {json.dumps(problem['input'], default=str)} found"


def did_you_mean(key: str, known: Sequence[str]) -> str:
    """ ", did you mean ...?", or nothing: a known key of the same last part, or one spelt nearly so."""
    last = key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == last]
    near = same or difflib.get_close_matches(key, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _check_together(settings: Settings, path: str | Path) -> None:
    """What no single field can tell."""
    schedule = settings.schedule
    if schedule.num_warmup_steps > schedule.num_steps:
        raise ConfigError(
            f"{path}: schedule.num_warmup_steps: at most schedule.num_steps ({schedule.num_steps}) expected, "
            f"{schedule.num_warmup_steps} found; shorten the warm-up"
        )
    if not Path(settings.data.path).is_file():
        raise ConfigError(
            f"{path}: data.path: a file expected, {settings.data.path} is none (seen from {Path.cwd()}); "
            "give the path of a .jsonl or .parquet file"
        )
