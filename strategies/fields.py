"""Files and messages of JSON form: one layer reads and writes them all, and names every fault.

A dataclass is the form of an object. Its fields are the keys, their types say what may stand there, and a field with
a default may be left out::

    bytes --parse--> JSON values --read_as(Form)--> Form(...)        limits on size, depth, digits, ranges, types
    Form(...) --as_json--> JSON values --save--> file

Whatever the bytes are, reading them ends in a value or in a :class:`FormError`.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import reprlib
import secrets
import stat
import types
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

MAX_BYTES = 16 << 20
"""Of a file. What is made of so much text stays below 200 MB."""

MAX_VALUES = 400_000
"""In a file: numbers, texts, lists and objects together."""

MAX_DEPTH = 32
"""Of what people may write freely: notes, a job's meta."""

MAX_DIGITS = 20
"""Of a whole number, before it is a number: those of 64 bits, as NCCL's in traces. Python reads thousands in quadratic
time."""

MAX_TEXT = 16_384
"""Characters of a name or a remark."""

LARGEST = 10**15
"""Of any number: microseconds of thirty years, elements of a petabyte. Products of two stay finite and exact enough."""

SMALLEST = 1 / LARGEST
"""Of a number that something is divided by."""

PACKED = b"\x1f\x8b"
"""How gzip's files begin."""

_NO_NEIGHBOURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""A folder that takes no further file, or in which a file must stay: one that is mounted there for a container."""

KINDS = {
    "espresso-job": "a job",
    "espresso-strategy": "a strategy",
    "espresso-cluster": "a cluster",
    "espresso-sensitivity": "a sensitivity",
    "espresso-flight": "a flight record",
    "espresso-probe": "a probe",
}
"""What a file says it is."""

SCHEMA_VERSION = 1
"""Of all of them."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80

T = TypeVar("T")
_E = TypeVar("_E", bound=Enum)


class FormError(ValueError):
    """A file, a message or a value of one is not what it should be. The message says where and what."""


@contextmanager
def faults(error: type[FormError], where: str = "") -> Iterator[None]:
    """Faults found in here are of this kind, and their messages begin with ``where``."""
    try:
        yield
    except FormError as found:
        raise error(f"{where}{found}") from None


def shown(value: Any) -> str:
    """``value`` in an error's message, cut where it is long."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # a whole number of too many digits to print
        return f"a value of type {type(value).__name__}"


def first_twice(names: list[str]) -> str:
    """The first of the names that is there more than once."""
    counts = Counter(names)
    return next(name for name in names if counts[name] > 1)


# Bytes to JSON values.


def parse(data: bytes | bytearray, *, most: int = MAX_BYTES) -> Any:
    """The JSON values of UTF-8 text.

    Raises:
        FormError: no JSON, more than ``most`` bytes or :data:`MAX_VALUES` in proportion, too deep, a key given twice,
            a number that JSON does not have or of too many digits, text that is no Unicode.
    """
    if len(data) > most:
        raise FormError(f"is longer than {most >> 20} MiB")
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES * (most // MAX_BYTES):
        raise FormError(f"holds more than {MAX_VALUES * (most // MAX_BYTES)} values")
    try:
        text = data.decode("utf-8")
        body = json.loads(text, object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)
        if _SURROGATE.search(text):
            json.dumps(body, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise FormError("is nested too deeply") from None
    except FormError:
        raise
    except ValueError as error:
        raise FormError(f"not a JSON file ({error})") from None
    return body


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        raise FormError(f"the key {shown(first_twice([key for key, _ in pairs]))} is given twice")
    return body


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise FormError(f"holds a whole number of {len(text)} digits")
    return int(text)


def _constant(text: str) -> float:
    raise FormError(f"holds {text}, which is no number of JSON; numbers are finite")


def load(path: str | Path, read: Callable[[Any], T], error: type[FormError], *, most: int = MAX_BYTES) -> T:
    """What ``read`` makes of a file's JSON values, which may be packed by gzip.

    Raises:
        error: the file is malformed; the message begins with the path.
        OSError: the file cannot be read.
    """
    data = bytearray()
    try:
        with open(path, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == PACKED else raw
            while len(data) <= most and (piece := file.read(1 << 20)):
                data += piece
    except (EOFError, zlib.error, gzip.BadGzipFile) as wrong:
        raise error(f"{path}: cannot be unpacked: {wrong}") from None
    with faults(error, f"{path}: "):
        return read(parse(data, most=most))


def save(path: str | Path, body: Any, indent: int | None = 1) -> None:
    """Write JSON values, as :func:`write` does."""
    write(path, (json.dumps(body, indent=indent, allow_nan=False) + "\n").encode())


def write(path: str | Path, data: bytes) -> None:
    """Write a file. Who reads meanwhile finds the old one or the new one; a full disk leaves the old one.

    Raises:
        OSError: the file cannot be written; names it.
    """
    try:
        if not _replaced(Path(path), data):
            Path(path).write_bytes(data)
    except OSError as error:
        error.filename = str(path)  # a full disk does not say which file
        raise


def _replaced(path: Path, data: bytes) -> bool:
    """Whether a file with this content was written beside a file and put in its place; not where that cannot be."""
    there = path.lstat() if os.path.lexists(path) else None
    if there is not None and not _may_go(path, there):
        return False
    beside = path.with_name(f".espresso-{secrets.token_hex(8)}")
    try:
        with open(beside, "xb") as file:
            if there is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(there.st_mode))
            file.write(data)
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _NO_NEIGHBOURS:
            return False
        raise
    return True


def _may_go(path: Path, there: os.stat_result) -> bool:
    """Whether another file may take its place: it is no device, pipe or link, has no second name, is the user's own."""
    is_own = there.st_uid == os.geteuid() and os.access(path, os.W_OK)
    return stat.S_ISREG(there.st_mode) and there.st_nlink <= 1 and is_own  # 0: another has taken its place since


# JSON values to what they mean.


def read_as(form: type[T], body: Any, where: str) -> T:
    """An object as a dataclass.

    Args:
        form: a dataclass of numbers, truth values, texts, enums, tuples (named ones too), mappings, ``Any`` and such
            dataclasses. Its own checks run too, and raise ValueError. A class variable ``RETIRED`` names keys that
            files of earlier versions have, and the only values with which they may be left out of account.
        where: what the object is called in messages: ``the job``, or where it stands in a file.

    Raises:
        FormError: an unknown or missing key, or a faulty value, by name.
    """
    kind: Any = form
    readers, required = _keys_of(kind)
    if not isinstance(body, dict):
        raise FormError(f"{where} must be a JSON object, got {type(body).__name__}")
    retired: Mapping[str, Any] = getattr(form, "RETIRED", {})
    body = {key: value for key, value in body.items() if key not in retired or value != retired[key]}
    for key in body:
        if key not in readers:
            raise FormError(f"{where} has an unknown key {shown(key)}; known are {sorted(readers)}")
    for key in required:
        if key not in body:
            raise FormError(f"{where} lacks the key {key!r}")
    is_top = where.startswith("the ")
    values = {key: readers[key](value, key if is_top else f"{where}.{key}") for key, value in body.items()}
    try:
        return form(**values)
    except ValueError as error:
        raise FormError(str(error) if is_top else f"{where}: {error}") from None


def without_head(body: Any, kind: str) -> dict[str, Any]:
    """A file's body without ``schema_version`` and ``kind``, which are looked at before anything else.

    Raises:
        FormError: a file of another kind, or of another version.
    """
    if not isinstance(body, dict):
        raise FormError(f"the file must be a JSON object, got {type(body).__name__}")
    said, rest = body.get("kind"), {key: value for key, value in body.items() if key not in ("schema_version", "kind")}
    if said != kind and isinstance(said, str) and said in KINDS:
        raise FormError(f"this is {KINDS[said]} file, and {KINDS[kind]} file is wanted here")
    for key, wanted in (("kind", kind), ("schema_version", SCHEMA_VERSION)):
        if key not in body:
            raise FormError(f"the file lacks the key {key!r}")
        if type(body[key]) is not type(wanted) or body[key] != wanted:
            raise FormError(f"{key} {shown(body[key])} is not supported; this version reads {wanted!r}")
    return rest


MOST_SCALED = 16
"""Of feedback gains: what is kept is divided by them."""


def head(kind: str) -> dict[str, Any]:
    """What a file of this kind begins with."""
    return {"schema_version": SCHEMA_VERSION, "kind": kind}


def number(value: Any, where: str, *, positive: bool = False) -> float:
    """``value`` as a finite float of at least zero (at least :data:`SMALLEST` where ``positive``)."""
    real = _real(value, where)
    if real < (SMALLEST if positive else 0):
        raise FormError(f"{where} must be finite and at least {SMALLEST if positive else 'zero'}, got {real:g}")
    return real


def scale(value: Any, where: str) -> float:
    """``value`` as a factor of feedback gains."""
    real = number(value, where)
    if not 1 / MOST_SCALED <= real <= MOST_SCALED:
        raise FormError(f"{where} must be from 1/{MOST_SCALED} to {MOST_SCALED}, got {real:g}")
    return real


def whole(value: Any, where: str, *, least: int = 0, most: int = LARGEST) -> int:
    """``value`` as a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FormError(f"{where} must be a whole number of at least {least}, got {shown(value)}")
    if value > most:
        raise FormError(f"{where} must be a whole number of at most {most}, got {shown(value)}")
    return value


def _real(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FormError(f"{where} must be a number, got {shown(value)}")
    if not abs(value) <= LARGEST:
        raise FormError(f"{where} must be finite and at most {LARGEST:g}, got {shown(value)}")
    return float(value)


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FormError(f"{where} must be a whole number, got {shown(value)}")
    return whole(value, where, least=-LARGEST)


def _typed(kind: type, wanted: str, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise FormError(f"{where} must be {wanted}, got {shown(value)}")
    return value


_truth, _items = partial(_typed, bool, "true or false"), partial(_typed, list, "a list")


def _text(value: Any, where: str) -> str:
    text: str = _typed(str, "text", value, where)
    if len(text) > MAX_TEXT:
        raise FormError(f"{where} must have at most {MAX_TEXT} characters, got {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FormError(f"{where} holds what is no Unicode: {shown(text)}") from None
    return text


def _free(value: Any, where: str) -> Any:
    """What people wrote there, level by level: any JSON, of a limited depth."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH or len(level) > MAX_VALUES:
            raise FormError(f"{where} is nested too deeply: more than {MAX_DEPTH} levels")
        for one in level:
            if isinstance(one, int | float) and not isinstance(one, bool):
                _real(one, where)
            elif isinstance(one, dict) and not all(isinstance(key, str) for key in one):
                raise FormError(f"{where} has a key that is no text")
            elif one is not None and not isinstance(one, str | bool | list | dict):
                raise FormError(f"{where} holds what JSON has not: {shown(one)}")
        lists = [one for one in level if isinstance(one, list)] + [
            list(one.values()) for one in level if isinstance(one, dict)
        ]
        level = [inner for values in lists for inner in values]
    return value


def member(kind: type[_E], value: Any, where: str) -> _E:
    """The member of an enum of texts with this value."""
    for item in kind:
        if isinstance(value, str) and item.value == value:
            return item
    known = ", ".join(str(item.value) for item in kind)
    raise FormError(f"{where} is {shown(value)}, which is none of {known}")


_Reader = Callable[[Any, str], Any]
_PLAIN: dict[Any, _Reader] = {float: _real, int: _whole, bool: _truth, str: _text, Any: _free}


@cache
def _keys_of(form: type[Any]) -> tuple[dict[str, _Reader], list[str]]:
    """How each key's value is read, and the keys that must be there."""
    hints = get_type_hints(form)
    known = [field for field in fields(form) if field.init]
    required = [f.name for f in known if f.default is MISSING and f.default_factory is MISSING]
    return {field.name: _reader(hints[field.name]) for field in known}, required


def _reader(kind: Any) -> _Reader:
    """How a value of a type is read."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin in (Union, types.UnionType):
        (inner,) = (one for one in inside if one is not types.NoneType)
        return partial(_read_optional, _reader(inner))
    if origin is tuple:
        several = inside[-1] is Ellipsis
        return partial(_read_each, _reader(inside[0])) if several else partial(_read_row, [*map(_reader, inside)])
    if origin in (dict, Mapping):
        return partial(_read_mapping, _reader(inside[1]))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return partial(member, kind)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return partial(_read_named, kind, [*map(_reader, get_type_hints(kind).values())])
    if not is_dataclass(kind):
        raise TypeError(f"{kind} has no form in JSON")
    form: Any = kind
    return partial(read_as, form)


def _read_optional(inner: _Reader, value: Any, where: str) -> Any:
    return None if value is None else inner(value, where)


def _read_each(inner: _Reader, value: Any, where: str) -> tuple[Any, ...]:
    return tuple(inner(item, f"{where}[{place}]") for place, item in enumerate(_items(value, where)))


def _read_row(inner: list[_Reader], value: Any, where: str) -> tuple[Any, ...]:
    if len(_items(value, where)) != len(inner):
        raise FormError(f"{where} must be a list of {len(inner)} values, got {shown(value)}")
    return tuple(read(item, f"{where}[{place}]") for place, (read, item) in enumerate(zip(inner, value, strict=True)))


def _read_named(form: Any, inner: list[_Reader], value: Any, where: str) -> Any:
    return form(*_read_row(inner, value, where))


def _read_mapping(inner: _Reader, value: Any, where: str) -> dict[str, Any]:
    _typed(dict, "a JSON object", value, where)
    return {_text(key, f"a key of {where}"): inner(item, f"{where}[{shown(key)}]") for key, item in value.items()}


def as_json(value: Any) -> Any:
    """What :func:`read_as` reads: dataclasses as objects, enums as their values, tuples as lists."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, tuple | list) else value
