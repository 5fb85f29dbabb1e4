"""Every exception type of hikv.

A message names the argument, what was expected, what came, and the remedy. Callers raise through
the constructors below, so no message can leave one of the four out.
"""

from __future__ import annotations

from numbers import Integral


class HikvError(Exception):
    """Base of every error that hikv raises on purpose."""


class ArgumentError(HikvError, ValueError):
    """A caller's value is wrong; raised before any byte moves.

    Attributes: `argument` (its name), `expected`, `got` and `remedy`, all strings.
    """

    def __init__(self, argument: str, *, expected: str, got: object, remedy: str) -> None:
        self.argument, self.expected, self.got, self.remedy = argument, expected, str(got), remedy
        super().__init__(f"{argument}: expected {expected}, got {got}; {remedy}")


class Unavailable(HikvError, RuntimeError):
    """This machine lacks something or cannot use it now: a GPU, its driver, pinned memory, a path.

    Attributes: `what` (for example `"pinned memory"`), `reason` and `remedy`.
    """

    def __init__(self, what: str, reason: str, *, remedy: str) -> None:
        self.what, self.reason, self.remedy = what, reason, remedy
        super().__init__(f"{what} is unavailable: {reason}; {remedy}")


class PathUnavailable(Unavailable):
    """A transfer path cannot serve this plan or cannot run on this machine.

    Attributes: `path` (for example `"tma"`) beside those of `Unavailable`.
    """

    def __init__(self, path: str, reason: str, *, remedy: str) -> None:
        self.path = path
        super().__init__(f"path {path!r}", reason, remedy=remedy)


class CapacityError(HikvError, MemoryError):
    """Memory or pages asked for exceed what is there.

    Attributes: `what`, `required` and `available` (in `unit`, bytes unless told), `remedy`.
    """

    def __init__(
        self, what: str, *, required: int, available: int, remedy: str, unit: str = "bytes"
    ) -> None:
        self.what, self.required, self.available = what, required, available
        self.unit, self.remedy = unit, remedy
        super().__init__(f"{what}: needs {required} {unit}, {available} available; {remedy}")


class CopyFailed(HikvError, RuntimeError):
    """The copy that someone waits for did not bring its bytes; the message says why, and so does
    `__cause__` where that was an exception."""


class DriverError(HikvError, RuntimeError):
    """A CUDA driver call failed; `call`, `code` and `name` say which and how."""

    def __init__(self, call: str, code: int, name: str, *, remedy: str) -> None:
        self.call, self.code, self.name, self.remedy = call, code, name, remedy
        super().__init__(f"{call} failed with {name} ({code}); {remedy}")


class InvariantError(HikvError, RuntimeError):
    """Books that cannot be: a fault of hikv, or of what wrote into its memory, never of a caller.

    The message begins with the name of the broken rule.
    """


class GatherError(HikvError, RuntimeError):
    """A gather across ranks failed. Every rank of the group raises it with the same words.

    Attributes: `reason` and `remedy`.
    """

    def __init__(self, reason: str, *, remedy: str) -> None:
        self.reason, self.remedy = reason, remedy
        super().__init__(f"{reason}; {remedy}")


def check_type(argument: str, value: object, kind: type, *, remedy: str) -> None:
    """Raise `ArgumentError` unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise ArgumentError(
            argument, expected=f"a {kind.__name__}", got=type(value).__name__, remedy=remedy
        )


def check_count(argument: str, value: object, *, remedy: str) -> None:
    """Raise `ArgumentError` unless `value` is a whole number of at least 0."""
    if not isinstance(value, Integral) or value < 0:
        raise ArgumentError(
            argument, expected="a whole number, 0 or more", got=repr(value), remedy=remedy
        )
