"""Compressor specs: ``name`` or ``name:key=value,key=value``, as users and strategy files write them.

The grammar lives here because a strategy holds specs; which names and keys exist is the registry's
business (``espresso.compressors``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ParamValue = bool | int | float | str

RESIDUAL_DTYPES = ("float32", "bf16", "int8")
"""How a residual may be kept between iterations, the widest first; ``float32`` is as wide as encoders work."""

MAX_NUMBER = 40
"""Characters of a parameter that is a number."""

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class CompressorSpec:
    """A compressor's id and parameters; ``params`` is sorted by key, so equal specs compare equal.

    Example:
        >>> CompressorSpec.parse("dgc:ratio=0.01").params
        (('ratio', 0.01),)
        >>> str(CompressorSpec.parse("int8:block=256"))
        'int8:block=256'
    """

    name: str
    params: tuple[tuple[str, ParamValue], ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(f"compressor spec: {self.name!r} is not a compressor id (lower-case letters and digits)")
        object.__setattr__(self, "params", tuple(sorted(self.params)))

    @classmethod
    def parse(cls, text: str) -> CompressorSpec:
        """Parse ``name[:key=value[,key=value…]]``.

        Raises:
            ValueError: the text does not have that form; the message shows the faulty part.
        """
        if not isinstance(text, str):
            raise TypeError(f"compressor spec: expected text such as 'dgc:ratio=0.01', got {type(text).__name__}")
        name, colon, rest = text.strip().partition(":")
        params: dict[str, ParamValue] = {}
        for item in rest.split(",") if colon else ():
            key, equals, value = item.partition("=")
            key = key.strip()
            if not equals or not _NAME.match(key) or not value.strip():
                raise ValueError(f"compressor spec {text!r}: {item!r} is not key=value")
            if key in params:
                raise ValueError(f"compressor spec {text!r}: {key!r} is given twice")
            params[key] = _parse_value(value.strip())
        return cls(name.strip(), tuple(params.items()))

    def without(self, *keys: str) -> CompressorSpec:
        """The spec with these parameters at their defaults."""
        return CompressorSpec(self.name, tuple(pair for pair in self.params if pair[0] not in keys))

    @property
    def residual_dtype(self) -> str:
        """How it says that its residual is kept, one of ``RESIDUAL_DTYPES``; empty: as the job keeps them."""
        return next((str(value) for key, value in self.params if key == "residual_dtype"), "")

    def kept_as(self, dtype: str) -> CompressorSpec:
        """The compressor with its residual kept so; empty: as the job keeps them."""
        rest = self.without("residual_dtype")
        return CompressorSpec(rest.name, (*rest.params, ("residual_dtype", dtype))) if dtype else rest

    def __str__(self) -> str:
        if not self.params:
            return self.name
        return f"{self.name}:" + ",".join(f"{key}={_format_value(value)}" for key, value in self.params)


def _parse_value(text: str) -> ParamValue:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float) if len(text) <= MAX_NUMBER else ():
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _format_value(value: ParamValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


NONE = CompressorSpec("none")
