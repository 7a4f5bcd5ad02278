"""Control messages as bytes: a closed set of values, none of which can run code when it is read.

A message is, little-endian::

     0  4s  magic "ESPM"
     4  I   version
     8  Q   bytes of the text, at most 64 MiB
    16      the text: JSON, ASCII
            the buffers that the text names, in its order, each at a multiple of 8 bytes

Texts, numbers, true, false and null stand for themselves. Everything else is a JSON array that begins with its kind::

    ["list", …]  ["tuple", …]  ["set", …]  ["dict", key, value, …]  ["bytes", size]
    ["array", dtype, shape]  ["tensor", dtype, shape]  ["record", class, value of each field]

Records are the dataclasses that a reader was made with. What comes out has the type of what went in; a set comes out
frozen, NumPy's numbers and subclasses of ``str`` as Python's own, a tensor on the CPU.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import torch

from espresso.comm.errors import ProtocolError

Bytes = npt.NDArray[np.uint8]

MAGIC, VERSION = b"ESPM", 1
MAX_TEXT_BYTES = 64 << 20
MAX_BYTES = 1 << 36
"""Of a message in all; a gathered checkpoint, or what a server keeps, is the largest."""
_HEADER = struct.Struct("<4sIQ")
_ALIGNMENT = 8

_DTYPES = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
_TORCH_DTYPES = {
    name: getattr(torch, name)
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64")
}
_SERIES = {"list": list, "tuple": tuple, "set": frozenset}
_KIND_OF_SERIES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "set"}


class Messages:
    """Writes and reads values.

    Args:
        records: the dataclasses that may travel beside plain values.

    Example:
        >>> messages = Messages()
        >>> messages.unpack(messages.pack({"sizes": (1, 2.5), "name": None}))
        {'sizes': (1, 2.5), 'name': None}
    """

    def __init__(self, *records: type) -> None:
        self._records = {record.__name__: record for record in records}

    def pack(self, value: Any) -> Bytes:
        """The message of a value.

        Raises:
            TypeError: something that no message holds.
            ProtocolError: too much of it.
        """
        buffers: list[Bytes] = []
        text = json.dumps(self._tree(value, buffers), separators=(",", ":")).encode()
        if len(text) > MAX_TEXT_BYTES:
            raise ProtocolError(f"a control message of {len(text)} bytes of text; at most {MAX_TEXT_BYTES} are read")
        parts = [np.frombuffer(_HEADER.pack(MAGIC, VERSION, len(text)) + text, np.uint8), *buffers]
        starts = [0]
        for part in parts:
            starts.append(_aligned(starts[-1] + part.nbytes))
        message = np.zeros(starts[-1], np.uint8)
        for start, part in zip(starts, parts, strict=False):
            message[start : start + part.nbytes] = part
        return message

    def unpack(self, message: Bytes) -> Any:
        """The value of a message; it shares no memory with it.

        Raises:
            ProtocolError: what no ``pack`` of this version wrote.
        """
        text_bytes = _text_bytes(message)
        buffers = _Buffers(message, _aligned(_HEADER.size + text_bytes))
        try:
            tree = json.loads(message[_HEADER.size : _HEADER.size + text_bytes].tobytes())
            value = self._value(tree, buffers)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise ProtocolError(f"a control message is malformed ({type(error).__name__}: {error!s:.200})") from error
        if buffers.at != message.nbytes:
            raise ProtocolError(f"a control message has {message.nbytes} bytes, its text names {buffers.at}")
        return value

    def _tree(self, value: Any, buffers: list[Bytes]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, str):
            return str(value)
        if kind in _KIND_OF_SERIES:
            return [_KIND_OF_SERIES[kind], *(self._tree(item, buffers) for item in value)]
        if kind is dict:
            return ["dict", *(self._tree(item, buffers) for pair in value.items() for item in pair)]
        if kind is bytes:
            buffers.append(np.frombuffer(value, np.uint8))
            return ["bytes", len(value)]
        if kind is np.ndarray and _DTYPES.get(value.dtype.name) == value.dtype:
            buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
            return ["array", value.dtype.name, list(value.shape)]
        if isinstance(value, torch.Tensor) and (dtype := str(value.dtype).removeprefix("torch.")) in _TORCH_DTYPES:
            buffers.append(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            return ["tensor", dtype, list(value.shape)]
        if self._records.get(kind.__name__) is kind:
            held = (getattr(value, each.name) for each in fields(value))
            return ["record", kind.__name__, *(self._tree(item, buffers) for item in held)]
        raise TypeError(f"a control message cannot hold {value!r:.80}, of type {kind.__qualname__}")

    def _value(self, tree: Any, buffers: _Buffers) -> Any:
        if not isinstance(tree, list | dict):
            return tree
        match tree:
            case ["list" | "tuple" | "set" as kind, *items]:
                return _SERIES[kind](self._value(item, buffers) for item in items)
            case ["dict", *items] if len(items) % 2 == 0:
                values = [self._value(item, buffers) for item in items]
                return dict(zip(values[::2], values[1::2], strict=True))
            case ["bytes", int(size)]:
                return buffers.take(size).tobytes()
            case ["array", str(name), list(shape)] if name in _DTYPES:
                return buffers.shaped(shape, _DTYPES[name].itemsize).view(_DTYPES[name]).reshape(shape)
            case ["tensor", str(name), list(shape)] if name in _TORCH_DTYPES:
                dtype = _TORCH_DTYPES[name]
                flat = buffers.shaped(shape, dtype.itemsize)
                return (
                    torch.from_numpy(flat).view(dtype).reshape(shape)
                    if flat.size
                    else torch.empty(shape, dtype=dtype, device="cpu")
                )
            case ["record", str(name), *items] if name in self._records:
                return self._record(self._records[name], [self._value(item, buffers) for item in items])
        raise ValueError(f"unknown value {tree!r:.80}")

    def _record(self, kind: type, held: list[Any]) -> Any:
        for (name, hint), value in zip(self._hints[kind].items(), held, strict=True):
            if not _fits(value, hint):
                raise ValueError(f"{kind.__name__}.{name} cannot be {value!r:.80}")
        return kind(*held)

    @cached_property
    def _hints(self) -> Mapping[type, dict[str, Any]]:
        """The type of every field of every dataclass."""
        hints = {kind: get_type_hints(kind) for kind in self._records.values()}
        return {kind: {f.name: hints[kind][f.name] for f in fields(kind)} for kind in hints}


PLAIN = Messages()
"""Plain values only."""


class _Buffers:
    """What follows a message's text."""

    def __init__(self, message: Bytes, at: int) -> None:
        self._message, self.at = message, at

    def take(self, num_bytes: int) -> Bytes:
        """A copy of the next buffer."""
        if not 0 <= num_bytes <= self._message.nbytes - self.at:
            raise ValueError(f"a buffer of {num_bytes} bytes, {self._message.nbytes - self.at} are left")
        found = self._message[self.at : self.at + num_bytes].copy()
        self.at = _aligned(self.at + num_bytes)
        return found

    def shaped(self, shape: list[Any], itemsize: int) -> Bytes:
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"shape {shape!r:.80}")
        return self.take(math.prod(shape) * itemsize)


def _text_bytes(message: Bytes) -> int:
    """The length of a message's text, after a look at its header."""
    if message.nbytes < _HEADER.size:
        raise ProtocolError(f"a control message of {message.nbytes} bytes has no header")
    magic, version, text_bytes = _HEADER.unpack(message[: _HEADER.size].tobytes())
    if (magic, version) != (MAGIC, VERSION):
        raise ProtocolError(
            f"a control message begins with {magic!r}, version {version}; expected {MAGIC!r}, version {VERSION}: do all"
            " ranks run the same espresso?"
        )
    if text_bytes > min(MAX_TEXT_BYTES, message.nbytes - _HEADER.size):
        raise ProtocolError(f"a control message of {message.nbytes} bytes claims a text of {text_bytes}")
    return int(text_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _fits(value: Any, hint: Any) -> bool:
    """Whether a field may hold a value: numbers, texts, unions, records, and what containers hold."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if (alias := getattr(origin, "__value__", None)) is not None:  # NumPy's are such from 2.5 on
        return _fits(value, alias)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inside)
    if origin is None:
        return type(value) in ((int, float) if hint is float else (hint,)) or (value is None and hint is type(None))
    if not isinstance(value, origin):
        return False
    if origin is tuple and inside[-1] is not Ellipsis:
        return len(value) == len(inside) and all(map(_fits, value, inside))
    if origin in (tuple, list, frozenset):
        return all(_fits(item, inside[0]) for item in value)
    if origin is dict:
        return all(_fits(k, inside[0]) and _fits(v, inside[1]) for k, v in value.items())
    return True
