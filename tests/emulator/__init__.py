"""The CUDA sources compiled for the host, and a device that runs them: byte for byte evidence where there is no GPU.

It emulates semantics (``shim.h`` says how far). It proves nothing about a real device's memory model or speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espresso.compressors.cuda import source_of

COMPILER = shutil.which("g++")
SHIM = Path(__file__).with_name("shim.h")
BUILD = Path(__file__).resolve().parents[2] / "build" / "emulator"

# No fused multiply-add, as on the device. What would fault there has to fault here: misaligned access, indices
# outside shared arrays.
FLAGS = [
    "-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-w",
    "-fsanitize=alignment,bounds,shift,integer-divide-by-zero", "-fno-sanitize-recover=all", "-static-libubsan",
]  # fmt: skip

RACES = Path(__file__).with_name("races.cpp")
RACE_FLAGS = [
    "-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-w", "-DEMULATOR_RACES",
    "-fno-gnu-unique", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0",
]  # fmt: skip

_C_TYPES = {
    np.int32: ctypes.c_int32,
    np.uint32: ctypes.c_uint32,
    np.int64: ctypes.c_int64,
    np.uint64: ctypes.c_uint64,
    np.float32: ctypes.c_float,
    np.float64: ctypes.c_double,
}
_LOCK = threading.Lock()
_LIBRARIES: dict[str, ctypes.CDLL] = {}


class EmulatedDevice:
    """Runs kernels on torch's CPU tensors. ``order``: 0 forward, 1 backward, above: shuffled.

    With ``races`` every access is watched (``races.cpp``, a hundred times as slow); what was found is in ``found``.
    Arrays of at most 16 bytes are not: several threads may note the same truth there.
    """

    torch_device = torch.device("cpu")

    def __init__(self, order: int = 0, *, races: bool = False) -> None:
        self.order, self.races = order, races
        self.launches: list[str] = []
        self.found: list[str] = []

    def lane(self) -> int:
        return threading.get_ident()

    def launch(self, file: str, kernel: str, grid: int, threads: int, arguments: Sequence[Any]) -> None:
        values = [
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else _C_TYPES[type(value)](value)
            for value in arguments
        ]
        with _LOCK:
            key = f"{file}, races" if self.races else file
            library = _LIBRARIES.get(key) or _LIBRARIES.setdefault(key, _load(file, races=self.races))
            self.launches.append(kernel)
            library.emulator_configure(grid, threads, self.order)
            if not self.races:
                getattr(library, kernel)(*values)
                return
            library.races_take.restype = ctypes.c_char_p
            for value in arguments:
                if isinstance(value, torch.Tensor) and value.nbytes > 16:
                    library.races_watch(ctypes.c_void_p(value.data_ptr()), ctypes.c_size_t(_extent(value)))
            getattr(library, kernel)(*values)
            library.races_forget()
            self.found += [f"{kernel}: {line}" for line in library.races_take().decode().splitlines()]


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def build(files: Sequence[str], *, races: bool = False) -> None:
    """Compile ahead, two at a time: ranks that start together then find the libraries."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda file: _load(file, races=races), files))


def _load(file: str, *, races: bool = False) -> ctypes.CDLL:
    assert COMPILER is not None, "the emulation needs g++"
    text = '#include "shim.h"\n' + source_of(file)
    flags = RACE_FLAGS if races else FLAGS
    made_of = text + SHIM.read_text() + " ".join(flags) + (RACES.read_text() if races else "")
    key = hashlib.blake2b(made_of.encode(), digest_size=10).hexdigest()
    stem = f"{Path(file).stem}-races" if races else Path(file).stem
    library = BUILD / f"{stem}-{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        for stale in BUILD.glob(f"{stem}-{'?' * len(key)}.so"):
            stale.unlink(missing_ok=True)
        source = library.with_suffix(f".{os.getpid()}.{threading.get_ident()}.cpp")
        source.write_text(text)
        made, part = source.with_suffix(".tmp"), source.with_suffix(".o")
        include = f"-I{SHIM.parent}"
        steps = [[COMPILER, *FLAGS, include, "-o", str(made), str(source)]]
        if races:  # without the compiler's own library for these calls
            steps = [
                [COMPILER, *RACE_FLAGS, include, "-c", "-o", str(part), str(source)],
                [COMPILER, "-shared", "-o", str(made), str(part), _watch()],
            ]
        for command in steps:
            subprocess.run(command, check=True, timeout=300)
        made.replace(library)
        source.unlink()
        part.unlink(missing_ok=True)
    return ctypes.CDLL(str(library))


@cache
def _watch() -> str:
    """The object file of ``races.cpp``: the same in all libraries, and a third of what one takes to compile."""
    BUILD.mkdir(parents=True, exist_ok=True)
    made = BUILD / f"watch-{hashlib.blake2b(RACES.read_bytes(), digest_size=10).hexdigest()}.o"
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        command = [str(COMPILER), "-std=c++17", "-O1", "-fPIC", "-c", "-o", str(part), str(RACES)]
        subprocess.run(command, check=True, timeout=300)
        part.replace(made)
    return str(made)
