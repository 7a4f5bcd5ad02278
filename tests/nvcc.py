"""The CUDA sources through ``nvcc`` for real devices, every warning an error. ``make cuda`` runs it.

Runs nothing: what the kernels compute is shown by ``tests/test_cuda_sources.py`` and, on a GPU, ``tests/test_gpu.py``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from espresso.compressors.cuda import source_of, sources

ARCHITECTURES = (75, 80, 90)
"""Compute capabilities. What the oldest lacks shows there."""


def complaints(nvcc: str, file: str) -> str:
    """What the compiler says of one source; nothing if all is well."""
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, file)
        source.write_text(source_of(file))
        command = [nvcc, "-std=c++17", "--fmad=false", "-Werror=all-warnings", *targets, "-fatbin", str(source)]
        done = subprocess.run(
            [*command, "-o", f"{source}.fatbin"], capture_output=True, text=True, timeout=600, check=False
        )
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}(exit status {done.returncode})"


def main() -> int:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.stdout.write("nvcc is not installed: the CUDA sources are not compiled here\n")
        return 0
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(sources(), pool.map(lambda file: complaints(nvcc, file), sources()), strict=True))
    for file, text in found.items():
        sys.stdout.write(f"{file}: {text or 'compiled for sm_' + ', sm_'.join(map(str, ARCHITECTURES))}\n")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
