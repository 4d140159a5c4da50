"""Every error that weightferry raises on purpose.

    WeightferryError
    ├── UsageError                 the caller must change something first; commands exit 2
    │   ├── ConfigError            a settings file or flag is wrong
    │   ├── BaseCheckpointError    the base directory is not a usable checkpoint
    │   ├── BaseMismatchError      this exchange, model or server belongs to another base
    │   ├── ExchangeNotFoundError  no exchange at that place
    │   ├── PortInUseError         another process listens on the port
    │   └── UnsupportedError       a model, adapter or engine that is refused, with the way out
    ├── ExchangeError              the exchange is not as it must be; commands exit 1
    │   ├── FormatError            written by another format, or not JSON of ours
    │   ├── IntegrityError         a file is missing, short, or has other bytes than its manifest says
    │   │   └── SignatureError     a manifest is not signed by the key that this reader requires
    │   ├── VersionNotFoundError   no such version, or retention has passed it
    │   ├── WriterActiveError      another live writer owns the exchange
    │   └── WriterFencedError      a newer writer has taken over; this one must stop
    ├── PublishError               a publication failed on some rank; nothing appeared
    ├── MergeError                 adapters could not be merged in place, or a rank failed meanwhile
    ├── LoadError              an adapter could not be loaded into a model; the model is as it was
    └── ApplyError                 a version could not be made active; the old one still answers
        ├── IncompatibleError      this server cannot serve what the version holds; the way out is named
        ├── DivergedError          the version's weights are not finite
        ├── SlowStorageError       the exchange or the cache did not answer within its deadline
        └── EngineBusyError        the engine did not stand still in time; nothing is wrong with the version

A message says what, where, expected and found, and what to do now, in one line where it can.
"""

from __future__ import annotations


class WeightferryError(Exception):
    """Root of the tree; `exit_code` is what a command ends with."""

    exit_code = 1


class UsageError(WeightferryError):
    """The caller must change something before trying again."""

    exit_code = 2


class ConfigError(UsageError):
    """A settings file or a flag is wrong."""


class BaseCheckpointError(UsageError):
    """The base directory is not a usable Hugging Face checkpoint."""


class BaseMismatchError(UsageError):
    """Two things that must share one base do not."""


class ExchangeNotFoundError(UsageError):
    """There is no exchange at the given place."""


class PortInUseError(UsageError):
    """Another process listens on the requested port."""


class UnsupportedError(UsageError):
    """A model, adapter or engine that weightferry refuses; the message names the way out."""


class ExchangeError(WeightferryError):
    """The exchange is not as the format requires."""


class FormatError(ExchangeError):
    """A file of the exchange is of another format, or not what its name promises."""


class IntegrityError(ExchangeError):
    """A file is missing, short, surplus or altered; `str` is what is wrong and what to do now."""

    def __init__(
        self,
        path: object,
        problem: str,
        *,
        expected: object = None,
        found: object = None,
        action: str = "do not use this version; open another one, or publish a new one",
    ) -> None:
        self.path, self.problem, self.expected, self.found = str(path), problem, expected, found
        self.action = action
        detail = "" if expected is None and found is None else f": {expected} expected, {found} found"
        self.finding = f"{path}: {problem}{detail}"
        super().__init__(f"{self.finding}; {action}" if action else self.finding)


class SignatureError(IntegrityError):
    """A manifest is not signed, or not by the key that its reader requires."""


class VersionNotFoundError(ExchangeError):
    """No version of that number can be opened."""

    def __init__(self, number: int, message: str) -> None:
        self.number = number
        super().__init__(message)


class WriterActiveError(ExchangeError):
    """Another live writer owns the exchange."""


class WriterFencedError(ExchangeError):
    """A newer writer has taken the exchange over; nothing of this one can appear any more."""


class PublishError(WeightferryError):
    """A publication failed; every rank raises this with the same rank and cause."""

    def __init__(self, rank: int, cause: str) -> None:
        self.rank, self.cause = rank, cause
        super().__init__(
            f"the version was not published: rank {rank} failed: {cause}. "
            "The model is untouched; publish again."
        )


class MergeError(WeightferryError):
    """merged_lora failed on some rank; every rank raises this, or its own error from inside the context."""

    def __init__(self, rank: int, cause: str, outcome: str) -> None:
        self.rank, self.cause = rank, cause
        super().__init__(f"merged_lora: rank {rank} failed: {cause}. {outcome}")


class LoadError(WeightferryError):
    """An adapter could not be read on some rank; every rank raises this with the same rank and cause."""

    def __init__(self, rank: int, cause: str) -> None:
        self.rank, self.cause = rank, cause
        super().__init__(f"the adapter was not loaded: rank {rank} failed: {cause}. The model is as it was")


class ApplyError(WeightferryError):
    """A version could not be made active."""


class IncompatibleError(ApplyError):
    """This server, started as it is, cannot serve what the version holds."""


class DivergedError(ApplyError):
    """The version's weights hold NaN or infinity."""


class SlowStorageError(ApplyError):
    """A call to the exchange or to the cache did not end within its deadline."""


class EngineBusyError(ApplyError):
    """The engine did not pause within its deadline; the version was not touched, a later try may succeed."""
