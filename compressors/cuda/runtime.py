"""Where kernels come from and how they are launched. CuPy compiles and loads; every byte of memory is torch's.

CuPy allocates nothing here, so torch and CuPy cannot disagree about an allocator and there is no second pool: scratch
and tables are torch tensors, and kernels get their addresses. Launches go to torch's current stream of the device,
so that they are ordered with torch's own work; CuPy's current stream, a different one, is never used.

A launch goes to the driver with a buffer of arguments that its thread keeps: CuPy's own way of launching (a device
and a stream entered and left, an object for every argument) took 38 us on an H200's host, this takes about a tenth.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from espresso.jit.folders import private_folder, user_folder, warn_once
from espresso.strategies.fields import write

COMPILER_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--device-as-default-execution-space")
"""Fused multiply-add rounds once where the host's kernels round twice, and the host keeps subnormal numbers: with
either, payload bytes would differ. All code is the device's: NVRTC 13.0 takes some lambdas for the host's."""

MAX_ARGUMENTS = 64

_SLOTS = {
    np.int32: "i4x",
    np.uint32: "I4x",
    np.int64: "q",
    np.uint64: "Q",
    np.float32: "f4x",
    np.float64: "d",
}
"""How an argument lies in its slot of eight bytes; tensors pass their address."""

_FOLDER = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


class CudaUnavailableError(RuntimeError):
    """CuPy or a CUDA device is missing; says which, and what to do."""


class Device(Protocol):
    """Where codecs run: a GPU, or the tests' emulation of one on the host."""

    torch_device: torch.device

    def lane(self) -> int:
        """Identifies the current stream: what is launched on one lane runs in the order of the launches."""
        ...

    def launch(self, file: str, kernel: str, grid: int, threads: int, arguments: Sequence[Any]) -> None:
        """Launch a kernel of ``file`` on the current stream.

        Args:
            arguments: NumPy scalars of exactly the kernel's types, and tensors, whose addresses are passed.
        """
        ...


def sources() -> tuple[str, ...]:
    """The names of all CUDA sources."""
    return tuple(sorted(path.name for path in _FOLDER.glob("*.cu")))


@cache
def source_of(file: str) -> str:
    """A CUDA source with what it includes put in its place: a cache keyed by the text then sees every change."""
    return _INCLUDE.sub(lambda found: source_of(found[1]), (_FOLDER / file).read_text())


class CudaDevice:
    """A GPU. Kernels are compiled by NVRTC for its architecture at first use, and kept on disk.

    The cubins lie in CuPy's cache folder, in files of ours. ``RawModule`` loads them from there instead of compiling
    them itself, because CuPy adds ``-ftz=true`` to whatever options it is given, and the last one counts.

    Args:
        index: torch's number of the device; None takes the current one.

    Raises:
        CudaUnavailableError: no CuPy, no device, or CuPy sees other devices than torch.
    """

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise CudaUnavailableError(
                "torch sees no CUDA device: the GPU compressors need one (and torch's CUDA build)"
            )
        self._cupy = _import_cupy()
        self._driver_launch = self._cupy.cuda.driver.launchKernel
        self._index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", self._index)
        self._check_same_device()
        self._cubins = CubinCache(self._cupy.cuda.nvrtc, torch.cuda.get_device_capability(self.torch_device))
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], _Kernel] = {}
        self._here = threading.local()
        self._lock = threading.Lock()

    def lane(self) -> int:
        return _current_stream(self._index)

    def launch(self, file: str, kernel: str, grid: int, threads: int, arguments: Sequence[Any]) -> None:
        """On torch's current stream of this device."""
        if torch.cuda.current_device() != self._index:  # the driver launches on the thread's current device
            with torch.cuda.device(self._index):
                self.launch(file, kernel, grid, threads, arguments)
            return
        found = self._kernels.get((file, kernel)) or self._load(file, kernel, arguments)
        slots = self._slots()
        found.layout.pack_into(
            slots.values, 0, *[a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        )
        self._driver_launch(found.address, grid, 1, 1, threads, 1, 1, 0, self.lane(), slots.address, 0)

    def _slots(self) -> _Slots:
        """The calling thread's; the driver has read them when a launch returns."""
        slots: _Slots | None = getattr(self._here, "slots", None)
        if slots is None:
            # A new thread has no context until a call of the runtime binds one; this does nothing else.
            self._cupy.cuda.runtime.free(0)
            slots = self._here.slots = _Slots()
        return slots

    def _load(self, file: str, kernel: str, arguments: Sequence[Any]) -> _Kernel:
        """One module a source."""
        with self._lock, self._cupy.cuda.Device(self._index):
            try:
                raw = self._function(file, kernel)
            except self._cupy.cuda.driver.CUDADriverError:  # a damaged file, or another user's
                raw = self._function(file, kernel, anew=True)
            forms = ["Q" if isinstance(a, torch.Tensor) else _SLOTS[type(a)] for a in arguments]
            found = self._kernels[file, kernel] = _Kernel(raw, struct.Struct("<" + "".join(forms)))
        return found

    def _function(self, file: str, kernel: str, *, anew: bool = False) -> Any:
        module = self._modules.get(file)
        if module is None:
            module = self._cupy.RawModule(path=str(self._cubins.path(file, anew=anew)))
        found = module.get_function(kernel)
        self._modules[file] = module  # it could be loaded
        return found

    def _check_same_device(self) -> None:
        """CuPy and torch count devices alike, unless somebody changed CUDA_VISIBLE_DEVICES between them."""
        runtime, count = self._cupy.cuda.runtime, self._cupy.cuda.runtime.getDeviceCount()
        mine = torch.cuda.get_device_properties(self.torch_device)
        ours, theirs = (mine.name, getattr(mine, "pci_bus_id", None)), ("nothing", None)
        if self._index < count:
            other = runtime.getDeviceProperties(self._index)
            theirs = (other["name"].decode(), None if ours[1] is None else other["pciBusID"])
        if count != torch.cuda.device_count() or ours != theirs:
            raise CudaUnavailableError(
                f"torch has {torch.cuda.device_count()} devices and calls number {self._index} {ours}, CuPy has"
                f" {count} and calls it {theirs}: set CUDA_VISIBLE_DEVICES before either is imported"
            )


class CubinCache:
    """Cubins of the sources for one architecture, compiled once a machine.

    Args:
        nvrtc: CuPy's binding of the compiler, ``cupy.cuda.nvrtc``.
        capability: the device's compute capability.
    """

    def __init__(self, nvrtc: Any, capability: tuple[int, int]) -> None:
        self._nvrtc = nvrtc
        mine = 10 * capability[0] + capability[1]
        known = max((a for a in nvrtc.getSupportedArchs() if a <= mine), default=mine)
        self._is_exact = known == mine  # else PTX of the newest architecture that the compiler knows
        kind = "sm" if self._is_exact else "compute"
        self.options = (*COMPILER_OPTIONS, f"--gpu-architecture={kind}_{known}")

    def path(self, file: str, *, anew: bool = False) -> Path:
        """Where the compiled source lies; its name tells text, options and compiler.

        Args:
            anew: whatever lies there is of no use.

        Raises:
            RuntimeError: it does not compile; with the compiler's log.
        """
        text = source_of(file)
        version = self._nvrtc.getVersion()
        key = hashlib.blake2b(repr((text, self.options, version)).encode(), digest_size=16).hexdigest()
        name = f"espresso-{Path(file).stem}-{key}.{'cubin' if self._is_exact else 'ptx'}"
        code = b""
        for folder in (partial(user_folder, "CUPY_CACHE_DIR", ".cupy", "kernel_cache"), private_folder):
            try:
                path = folder() / name
                if anew or not path.exists():
                    code = code or self._compile(file, text)
                    write(path, code)
                return path
            except OSError:
                warn_once("CuPy's folder for compiled kernels cannot be written; set CUPY_CACHE_DIR to one that can")
        return self._in_memory(name, code or self._compile(file, text))

    def _in_memory(self, name: str, code: bytes) -> Path:
        """A file that lies in memory, as long as this process lives: for where none can be written."""
        number = os.memfd_create(name)
        with open(number, "wb", closefd=False) as made:
            made.write(code)
        return Path(f"/proc/self/fd/{number}")

    def _compile(self, file: str, text: str) -> bytes:
        program = self._nvrtc.createProgram(text, file, (), ())
        try:
            self._nvrtc.compileProgram(program, self.options)
            code = self._nvrtc.getCUBIN(program) if self._is_exact else self._nvrtc.getPTX(program)
            return code if isinstance(code, bytes) else str(code).encode()
        except self._nvrtc.NVRTCError as error:
            raise RuntimeError(f"{file} does not compile: {self._nvrtc.getProgramLog(program)}") from error
        finally:
            self._nvrtc.destroyProgram(program)


class _Kernel:
    """A loaded kernel: its address in the driver, and how its arguments lie."""

    def __init__(self, raw: Any, layout: struct.Struct) -> None:
        self.raw = raw  # keeps the module loaded
        self.address = int(raw.kernel.ptr)
        self.layout = layout


class _Slots:
    """Room for a launch's arguments, eight bytes each, and the addresses of the slots, as the driver takes them."""

    def __init__(self) -> None:
        self.values = ctypes.create_string_buffer(8 * MAX_ARGUMENTS)
        begin = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_uint64 * MAX_ARGUMENTS)(*range(begin, begin + 8 * MAX_ARGUMENTS, 8))
        self.address = ctypes.addressof(self._pointers)


def _slow_current_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_current_stream)
"""The address of torch's current stream, by the call that Triton and Inductor launch with: without a Stream object."""


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise CudaUnavailableError(
            "the GPU compressors need CuPy, which cannot be imported"
            f" ({error}): pip install cupy-cuda13x, or cupy-cuda12x for CUDA 12"
        ) from error
    return cupy
