"""The CUDA sources through NVRTC, with which CuPy compiles them where they run; warnings count. It needs no GPU.

``make cuda`` runs it. What the kernels compute is shown by ``tests/test_cuda_sources.py`` and, on a GPU,
``tests/test_gpu.py``. ``nvcc`` is another front: it takes what NVRTC refuses.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

from espresso.compressors.cuda import source_of, sources
from espresso.compressors.cuda.runtime import CubinCache

ARCHITECTURES = (75, 80, 90)
"""Compute capabilities. What the oldest lacks shows there."""


def nvrtc() -> Any:
    """CuPy's binding of the compiler, which is loaded.

    Raises:
        ImportError: one of them is not installed.
    """
    try:
        from cupy.cuda import nvrtc as found

        found.getVersion()
    except (ImportError, RuntimeError) as error:
        raise ImportError(f"the CUDA sources cannot be compiled here: {error}") from error
    return found


def complaints(compiler: Any, file: str, architecture: int) -> str:
    """What the compiler says of one source; nothing if all is well."""
    options = CubinCache(compiler, divmod(architecture, 10)).options
    program = compiler.createProgram(source_of(file), file, (), ())
    try:
        compiler.compileProgram(program, options)
    except compiler.NVRTCError as error:
        return f"{error}: {compiler.getProgramLog(program)}"
    else:
        return str(compiler.getProgramLog(program)).strip()
    finally:
        compiler.destroyProgram(program)


def main() -> int:
    compiler = nvrtc()
    jobs = list(product(sources(), ARCHITECTURES))
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(jobs, pool.map(lambda job: complaints(compiler, *job), jobs), strict=True))
    for (file, architecture), text in found.items():
        sys.stdout.write(f"{file} for sm_{architecture}: {text or 'compiled'}\n")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
