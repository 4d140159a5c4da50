"""The settings as people read them: key, values, default and sentence, taken from the settings themselves.

Called by `--help`, by the messages about a wrong setting, and by the test that holds docs/trainer.md to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .settings import SETTINGS

REQUIRED = "required"
_PLAIN = {"string": "string", "boolean": "true or false", "object": "table", "null": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingWords:
    """One setting; `key` is dotted, as `--set` takes it."""

    key: str
    values: str
    default: str
    sentence: str


def all_settings() -> list[SettingWords]:
    """Top-level settings first, then each table's."""
    schema = SETTINGS.json_schema()
    plain, tables = [], []
    for name, entry in schema["properties"].items():
        if "$ref" not in entry:
            plain.append(_words(name, entry, name in schema["required"]))
            continue
        table = schema["$defs"][entry["$ref"].rpartition("/")[2]]
        required = table.get("required", ())
        tables += [_words(f"{name}.{key}", e, key in required) for key, e in table["properties"].items()]
    return [*plain, *tables]


def help_text() -> str:
    """Every setting on two lines."""
    return "\n".join(
        f"  {words.key} = {words.values}  ({_default_words(words.default)})\n      {words.sentence}"
        for words in all_settings()
    )


def _default_words(default: str) -> str:
    return default if default in (REQUIRED, "not given") else f"default {default}"


def _words(key: str, entry: dict[str, Any], is_required: bool) -> SettingWords:
    default = "not given" if entry.get("default", {}) is None else json.dumps(entry.get("default", {}))
    return SettingWords(
        key=key,
        values=_values(entry),
        default=REQUIRED if is_required else default,
        sentence=" ".join(entry["description"].split()),
    )


def _values(entry: dict[str, Any]) -> str:
    if "enum" in entry:
        return ", ".join(json.dumps(value) for value in entry["enum"])
    if "anyOf" in entry:
        return " or ".join(filter(None, map(_values, entry["anyOf"])))
    if "prefixItems" in entry:
        return f"[{', '.join(map(_values, entry['prefixItems']))}]"
    if entry["type"] in ("integer", "number"):
        return entry["type"] + _least(entry)
    return _PLAIN[entry["type"]]


def _least(entry: dict[str, Any]) -> str:
    if "minimum" in entry:
        return f" from {entry['minimum']:g}"
    if entry["type"] == "integer":
        return f" from {entry['exclusiveMinimum'] + 1:g}"
    return f" above {entry['exclusiveMinimum']:g}"
