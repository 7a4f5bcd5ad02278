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
    """Runs kernels on torch's CPU tensors. ``order``: 0 forward, 1 backward, above: shuffled."""

    torch_device = torch.device("cpu")

    def __init__(self, order: int = 0) -> None:
        self.order = order
        self.launches: list[str] = []

    def lane(self) -> int:
        return threading.get_ident()

    def launch(self, file: str, kernel: str, grid: int, threads: int, arguments: Sequence[Any]) -> None:
        values = [
            ctypes.c_void_p(value.data_ptr())
            if isinstance(value, torch.Tensor)
            else _C_TYPES[type(value)](value)
            for value in arguments
        ]
        with _LOCK:
            library = _LIBRARIES.get(file) or _LIBRARIES.setdefault(file, _load(file))
            self.launches.append(kernel)
            library.emulator_configure(grid, threads, self.order)
            getattr(library, kernel)(*values)


def build(files: Sequence[str]) -> None:
    """Compile ahead, two at a time: ranks that start together then find the libraries."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_load, files))


def _load(file: str) -> ctypes.CDLL:
    assert COMPILER is not None, "the emulation needs g++"
    text = '#include "shim.h"\n' + source_of(file)
    key = hashlib.blake2b((text + SHIM.read_text() + " ".join(FLAGS)).encode(), digest_size=10).hexdigest()
    library = BUILD / f"{Path(file).stem}-{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        for stale in BUILD.glob(f"{Path(file).stem}-*.so"):
            stale.unlink(missing_ok=True)
        source = library.with_suffix(f".{os.getpid()}.{threading.get_ident()}.cpp")
        source.write_text(text)
        made = source.with_suffix(".tmp")
        command = [COMPILER, *FLAGS, f"-I{SHIM.parent}", "-o", str(made), str(source)]
        subprocess.run(command, check=True, timeout=300)
        made.replace(library)
        source.unlink()
    return ctypes.CDLL(str(library))
