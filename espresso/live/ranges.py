"""What a setting may be. A wrong one is an error that names the setting, the value and the range."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Protocol


class Range(Protocol):
    """The range of a setting."""

    def check(self, name: str, value: Any) -> None:
        """Refuse a value.

        Raises:
            TypeError: it is of another type.
            ValueError: it is out of range.
        """
        ...


@dataclass(frozen=True)
class Whole:
    """A whole number from ``low`` to ``high``."""

    low: int
    high: int
    multiple: int = 1
    optional: bool = False

    def check(self, name: str, value: Any) -> None:
        what = "a whole number" if self.multiple == 1 else f"a multiple of {self.multiple}"
        wanted = f"{what} from {self.low} to {self.high}" + (" or None" if self.optional else "")
        if self.optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise _mistyped(name, wanted, value)
        if not self.low <= value <= self.high or value % self.multiple:
            raise _out_of_range(name, wanted, value)


@dataclass(frozen=True)
class Real:
    """A number above 0 and up to ``high``."""

    high: float
    optional: bool = False

    def check(self, name: str, value: Any) -> None:
        wanted = f"a number above 0 and up to {self.high:g}" + (" or None" if self.optional else "")
        if self.optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _mistyped(name, wanted, value)
        if math.isnan(value) or not 0 < value <= self.high:
            raise _out_of_range(name, wanted, value)


@dataclass(frozen=True)
class Flag:
    """True or False."""

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise _mistyped(name, "True or False", value)


@dataclass(frozen=True)
class OneOf:
    """One of some names."""

    names: tuple[str, ...]

    def check(self, name: str, value: Any) -> None:
        wanted = f"one of {', '.join(self.names)}"
        if not isinstance(value, str):
            raise _mistyped(name, wanted, value)
        if value not in self.names:
            raise _out_of_range(name, wanted, value)


@dataclass(frozen=True)
class Path:
    """A path or None."""

    def check(self, name: str, value: Any) -> None:
        if value is not None and not isinstance(value, str | os.PathLike):
            raise _mistyped(name, "a path or None", value)


def _mistyped(name: str, wanted: str, value: Any) -> TypeError:
    return TypeError(f"{name} must be {wanted}, got {value!r:.80} ({type(value).__name__})")


def _out_of_range(name: str, wanted: str, value: Any) -> ValueError:
    return ValueError(f"{name} must be {wanted}, got {value!r:.80}")
