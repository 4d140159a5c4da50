"""Kinds of refusals: a small closed set, for counters and for the operator's table in docs/operations.md.

Invariant: the kind follows from the error's type alone, never from its words, so that words may change. An
error that is nobody's (a fault of ours) is "unexpected".
"""

from __future__ import annotations

from enum import StrEnum

from ..shared.errors import (
    ApplyError,
    BaseMismatchError,
    DivergedError,
    EngineBusyError,
    ExchangeError,
    IncompatibleError,
    SignatureError,
    SlowStorageError,
    UnsupportedError,
    VersionNotFoundError,
)


class RefusalKind(StrEnum):
    """Why a version was not made active."""

    DAMAGED = "damaged"
    SIGNATURE = "signature"
    GONE = "gone"
    STORAGE = "storage"
    OTHER_BASE = "other_base"
    INCOMPATIBLE = "incompatible"
    DIVERGED = "diverged"
    BUSY = "busy"
    APPLY_FAILED = "apply_failed"
    UNEXPECTED = "unexpected"


# The first that fits counts: a class stands before the one that it derives from.
_KINDS: tuple[tuple[type[Exception], RefusalKind], ...] = (
    (SignatureError, RefusalKind.SIGNATURE),
    (VersionNotFoundError, RefusalKind.GONE),
    (ExchangeError, RefusalKind.DAMAGED),
    (OSError, RefusalKind.STORAGE),
    (SlowStorageError, RefusalKind.STORAGE),
    (BaseMismatchError, RefusalKind.OTHER_BASE),
    (UnsupportedError, RefusalKind.INCOMPATIBLE),
    (IncompatibleError, RefusalKind.INCOMPATIBLE),
    (DivergedError, RefusalKind.DIVERGED),
    (EngineBusyError, RefusalKind.BUSY),
    (ApplyError, RefusalKind.APPLY_FAILED),
)


def kind_of(error: Exception) -> RefusalKind:
    """The kind of the refusal that this error causes."""
    return next((kind for known, kind in _KINDS if isinstance(error, known)), RefusalKind.UNEXPECTED)
