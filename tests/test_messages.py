"""Control messages: what goes in comes out, what is malformed is a named error, and nothing is ever unpickled."""

from __future__ import annotations

import ast
import json
import pickle
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from typing_extensions import TypeAliasType

from espresso.comm.errors import EspressoError, ProtocolError
from espresso.comm.messages import MAX_TEXT_BYTES, PLAIN, Messages
from espresso.comm.parameter_server.wire import BODIES, Held, Key, Stretch, Table
from espresso.strategies import CompressorSpec

KEY = Key(
    3, 0, (0, 1), (Stretch("a", 0, 4),), "float32", CompressorSpec.parse("dgc:ratio=0.01"), True, True, True,
    False, 10, 20, 0, 7,
)  # fmt: skip
TABLE = Table(1, (0, 1), (KEY,), {"a": 4}, frozenset({"a"}), "abc", True, None, frozenset({1}), 3.0)


def by_hand(tree: Any, buffers: bytes = b"", magic: bytes = b"ESPM", version: int = 1) -> np.ndarray:
    """A message with this text."""
    text = json.dumps(tree).encode()
    text += b" " * (-len(text) % 8)
    return np.frombuffer(struct.pack("<4sIQ", magic, version, len(text)) + text + buffers, np.uint8)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -(2**62), 10**30, 0.1, float("inf"), "", "é\0\ud7ff", b"", b"ab\0", [], (), {}, frozenset(),
        [1, (2, [3.5, None])], {"a": (1,), 2: {"b": b"c"}, (1, "x"): None}, frozenset({1, "a"}),
    ],
)  # fmt: skip
def test_plain_values_come_out_as_they_went_in(value):
    found = PLAIN.unpack(PLAIN.pack(value))
    assert found == value
    assert type(found) is type(value)


def test_numbers_of_numpy_and_texts_of_classes_are_pythons():
    numbers = [np.float32(0.5), np.int64(3), np.bool_(True), np.float64(0.1), torch.__version__]
    found = PLAIN.unpack(PLAIN.pack(numbers))
    assert found == [0.5, 3, True, 0.1, str(torch.__version__)]
    assert [type(value) for value in found] == [float, int, bool, float, str]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_arrays_come_out_writable_and_on_their_own(dtype, shape):
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    message = PLAIN.pack([value, value.T])
    found, turned = PLAIN.unpack(message)
    message[:] = 0
    np.testing.assert_array_equal(found, value)
    np.testing.assert_array_equal(turned, value.T)
    assert found.dtype == value.dtype
    assert found.flags.writeable
    assert found.base is None or not np.shares_memory(found, message)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_tensors_come_out(dtype, shape):
    value = torch.ones(shape).cumsum(0 if not shape else -1).to(dtype)
    found = PLAIN.unpack(PLAIN.pack(value.T if value.ndim == 2 else value))
    assert torch.equal(found, value.T if value.ndim == 2 else value)
    assert found.dtype == dtype


def test_records_come_out_equal():
    assert BODIES.unpack(BODIES.pack(TABLE)) == TABLE
    held = BODIES.unpack(BODIES.pack([Held("a", 3, np.arange(3, dtype=np.float32))]))[0]
    assert (held.tensor, held.start, held.values.tolist()) == ("a", 3, [0.0, 1.0, 2.0])


Number = TypeVar("Number", bound=np.generic)
Numbers = TypeAliasType("Numbers", np.ndarray[Any, np.dtype[Number]], type_params=(Number,))
"""As NumPy's own NDArray is from 2.5 on."""


@dataclass(frozen=True)
class Sample:
    values: Numbers[Any]


def test_fields_whose_types_are_aliases_are_read_and_checked():
    messages = Messages(Sample)
    found = messages.unpack(messages.pack(Sample(np.arange(2))))
    assert found.values.tolist() == [0, 1]
    with pytest.raises(ProtocolError, match=r"Sample\.values cannot be 3"):
        messages.unpack(by_hand(["record", "Sample", 3]))


@pytest.mark.parametrize("value", [object(), ValueError("x"), np.zeros(2, "S3"), np.zeros(2, ">f4"), KEY, lambda: 0])
def test_what_no_message_holds_is_refused_by_its_writer(value):
    with pytest.raises(TypeError, match="a control message cannot hold"):
        PLAIN.pack([value])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (np.zeros(3, np.uint8), "no header"),
        (by_hand(1, magic=b"ESPS"), "do all ranks run the same espresso"),
        (by_hand(1, version=2), "do all ranks run the same espresso"),
        (by_hand(["Key"]), "unknown value"),
        (by_hand({"a": 1}), "unknown value"),
        (by_hand(["dict", 1]), "unknown value"),
        (by_hand(["dict", ["list"], 1]), "malformed"),
        (by_hand(["set", ["list"]]), "malformed"),
        (by_hand(["bytes", 9], b"12345678"), "a buffer of 9 bytes, 8 are left"),
        (by_hand(["bytes", -1], b"12345678"), "a buffer of -1"),
        (by_hand(["bytes", 1], b"1" * 16), "its text names"),
        (by_hand(["array", "float32", [2**62, 4]], b"1" * 16), "a buffer of"),
        (by_hand(["array", "float32", [0, 2**70]]), "malformed"),
        (by_hand(["tensor", "float32", [0, 2**70]]), "malformed"),
        (by_hand(["array", "float32", [-1, -4]], b"1" * 16), "shape"),
        (by_hand(["array", "float32", [True]], b"1" * 8), "shape"),
        (by_hand(["array", "object", [1]], b"1" * 8), "unknown value"),
        (by_hand(["record", "Stretch", "a", 0]), "malformed"),
        (by_hand(["record", "Stretch", "a", 0, "b"]), "Stretch.numel cannot be 'b'"),
        (by_hand(["record", "Stretch", "a", 0, 2.5]), "Stretch.numel cannot be 2.5"),
        (by_hand(["record", "Popen", "ls"]), "unknown value"),
    ],
)
def test_what_is_malformed_is_a_named_error(message, said):
    with pytest.raises(ProtocolError, match=said):
        BODIES.unpack(message)


def test_texts_are_limited_in_length_digits_and_depth():
    with pytest.raises(ProtocolError, match="claims a text of"):
        PLAIN.unpack(np.frombuffer(struct.pack("<4sIQ", b"ESPM", 1, MAX_TEXT_BYTES + 1) + b" " * 64, np.uint8))
    for text in (b"[" * 100_000, b"9" * 10_000, b"[" * 900 + b'"list"' + b"]" * 900):
        body = struct.pack("<4sIQ", b"ESPM", 1, len(text)) + text
        with pytest.raises(ProtocolError, match="malformed"):
            PLAIN.unpack(np.frombuffer(body + b" " * (-len(body) % 8), np.uint8))


def test_mutated_messages_are_read_or_refused():
    source = {"table": TABLE, "held": [Held("a", 0, np.arange(5.0))], "rest": (b"xyz", torch.arange(3), float("nan"))}
    message, draw = BODIES.pack(source), random.Random(0)
    refused = 0
    for _ in range(3000):
        mutant = message.copy()
        for _ in range(draw.randint(1, 4)):
            mutant[draw.randrange(len(mutant))] = draw.randrange(256)
        try:
            BODIES.unpack(mutant[: draw.randrange(len(mutant))] if draw.random() < 0.3 else mutant)
        except EspressoError:
            refused += 1
    assert refused > 2000


class Bomb:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def test_a_pickle_is_no_message():
    with pytest.raises(ProtocolError, match="begins with"):
        PLAIN.unpack(np.frombuffer(pickle.dumps([Bomb(), "x" * 20]), np.uint8))


FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
OBJECTS = ("_object", "_object_list")
"""What torch calls its collectives that pickle."""


def unpickles(source: str) -> list[int]:
    """Lines that import a pickler, call a collective of objects, or load a file of torch without ``weights_only``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            wrong = any(alias.name.split(".")[0] in FORBIDDEN for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            wrong = str(node.module).split(".")[0] in FORBIDDEN
        elif isinstance(node, ast.Attribute):
            wrong = node.attr.endswith(OBJECTS)
        elif isinstance(node, ast.Call):
            is_load = ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load")
            safe = {"weights_only": "True", "allow_pickle": "False"}
            wrong = is_load and not any(safe.get(str(k.arg)) == ast.unparse(k.value) for k in node.keywords)
        else:
            continue
        if wrong:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from pickle import loads", "dist.all_gather_object([], 1)", "dist.broadcast_object_list([])",
     "torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)"],
)  # fmt: skip
def test_the_search_for_pickles_finds_them(line):
    assert unpickles(line) == [1]


def test_the_product_unpickles_nothing():
    root = Path(__file__).resolve().parents[1]
    folders = ("comm", "compressors", "cpu_offload", "strategies", "espresso")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert len(files) > 100
    assert {str(path): lines for path in files if (lines := unpickles(path.read_text()))} == {}
