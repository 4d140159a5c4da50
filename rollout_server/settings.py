"""The settings of the rollout server's plug-in, from the environment: one frozen dataclass.

`weightferry serve` sets these variables and starts vLLM; a plain `vllm serve` with the variables and
`VLLM_PLUGINS=weightferry` set by hand behaves the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from ..shared.errors import ConfigError
from ..shared.signing import CheckingKey, load_checking_key
from .pause import PAUSE_MODES, PausePolicy

PREFIX = "WEIGHTFERRY_"
APPLY_MODES = ("merged", "fold", "adapter")


def setting(default: str | None, sentence: str, *, is_secret: bool = False) -> str:
    """A field with its sentence; a default of None makes it required, and a secret is never printed."""
    metadata = {"sentence": sentence, "default": default}
    return field(metadata=metadata, repr=not is_secret)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """One field a variable: WEIGHTFERRY_EXCHANGE is `exchange`."""

    exchange: str = setting(None, "The exchange to watch; it need not exist yet.")
    apply: str = setting("merged", "How a version is made active: merged, fold or adapter.")
    pause_mode: str = setting(
        "keep", "What replacing merged weights does with running requests: keep, wait or abort."
    )
    pause_deadline_s: str = setting("60", "Seconds that the engine may take to stand still for it.")
    base: str = setting("", "The local directory of the base; vLLM's model where empty.")
    poll_interval_s: str = setting(
        "", "Seconds between two looks at the exchange's pointer; where empty 0.5, in a bucket 2."
    )
    require_signature: str = setting(
        "", "A key file: versions that this key did not sign are refused; none are asked for where empty."
    )
    token_file: str = setting(
        "", "A file with the token that opens the control routes; without a token they stay closed."
    )
    token: str = setting("", "The token itself, in place of a file.", is_secret=True)
    cache_dir: str = setting(
        "", "A host-local directory for staged files, this server's own; a temporary one where empty."
    )
    deadline_s: str = setting("300", "Seconds that any single call to the engine or the exchange may take.")
    max_tries: str = setting("4", "How often a version that fails is tried before it is refused for good.")
    retry_s: str = setting(
        "2", "Seconds before a failed version is tried again; five times longer each time."
    )

    @property
    def interval(self) -> float | None:
        """None: as `shared.watch` does it for this kind of exchange."""
        return float(self.poll_interval_s) if self.poll_interval_s else None

    @property
    def checking_key(self) -> CheckingKey | None:
        return load_checking_key(Path(self.require_signature)) if self.require_signature else None

    @property
    def control_token(self) -> str | None:
        """What opens the control routes; None keeps them closed. ConfigError if it cannot be read."""
        if self.token and self.token_file:
            raise ConfigError(f"{variable('token')} and {variable('token_file')} are both set: keep one")
        if not self.token_file:
            return self.token or None
        try:
            token = Path(self.token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token file {self.token_file} cannot be read: {error}") from None
        if not token:
            raise ConfigError(f"the token file {self.token_file} is empty: write a token into it")
        return token

    @property
    def deadline(self) -> float:
        return float(self.deadline_s)

    @property
    def pause_policy(self) -> PausePolicy:
        return PausePolicy(mode=self.pause_mode, deadline_s=float(self.pause_deadline_s))

    @property
    def tries(self) -> int:
        return int(self.max_tries)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ServerSettings:
        """Read and check all variables; ConfigError names the first that is wrong."""
        values = {
            entry.name: _read(entry.name, entry.metadata["default"], environment) for entry in fields(cls)
        }
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        return {variable(entry.name): getattr(self, entry.name) for entry in fields(self)}

    def __post_init__(self) -> None:
        for name, known in {"apply": APPLY_MODES, "pause_mode": PAUSE_MODES}.items():
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{variable(name)}={value!r}: expected one of {', '.join(known)}")
        for name, kind in {
            "poll_interval_s": float,
            "pause_deadline_s": float,
            "deadline_s": float,
            "retry_s": float,
            "max_tries": int,
        }.items():
            if name == "poll_interval_s" and not self.poll_interval_s:
                continue
            _require_positive(name, getattr(self, name), kind)

    def retry_after(self, tries: int, num_excused: int) -> float | None:
        """Seconds to wait after so many failed tries; None: never again.

        Those that say nothing against the version are excused: only the others are bounded.
        """
        if tries - num_excused >= self.tries:
            return None
        return float(self.retry_s) * 5 ** (min(tries, self.tries) - 1)


def variable(name: str) -> str:
    return PREFIX + name.upper()


def _read(name: str, default: str | None, environment: Mapping[str, str]) -> str:
    value = environment.get(variable(name), default)
    if not value and default is None:
        raise ConfigError(f"{variable(name)} is not set: name the exchange to watch")
    return value or ""


def _require_positive(name: str, value: str, kind: type[float] | type[int]) -> None:
    try:
        is_positive = 0 < kind(value) < math.inf
    except ValueError:
        is_positive = False
    if not is_positive:
        what = "whole number" if kind is int else "number"
        raise ConfigError(f"{variable(name)}={value!r}: expected a {what} above 0")
