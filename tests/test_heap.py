"""What a step frees and makes anew is not fetched from the kernel page by page.

In fresh interpreters, which load nothing else: what others leave on the heap would tell on the figures.
"""

import os
import platform
import subprocess
import sys

import pytest

from espresso.live import heap

SCRIPT = """
import ctypes, resource, runpy, sys
keep_freed_memory = runpy.run_path(sys.argv[1])["keep_freed_memory"]

ctypes.CDLL(None).mallopt(-3, 128 << 10)  # as glibc begins; it would raise this by what it happens to see
kept = keep_freed_memory() if sys.argv[2] == "keep" else None

def step():
    return [b"1" * 20_000_000 for _ in range(4)]

for _ in range(4):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""
PAGES = 4 * 20_000_000 // 4096

BELOW_WHAT_IS_USED = """
import runpy, sys
heap = runpy.run_path(sys.argv[1])

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

heap["keep_freed_memory"]()
held = [b"1" * 20_000_000 for _ in range(5)]
del held[:4]  # what is left lies above them
before = resident()
heap["give_freed_memory_back"]()
print(before - resident())
"""


def run(how: str, **environment: str) -> tuple[str, int]:
    command = [sys.executable, "-c", SCRIPT, heap.__file__, how]
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    out = subprocess.run(command, env=mine | environment, capture_output=True, text=True, check=True).stdout
    kept, faults = out.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_blocks_are_kept_unless_the_process_was_told_otherwise():
    assert run("leave")[1] > PAGES // 2, "nothing to mend here"
    kept, faults = run("keep")
    assert kept == "True"
    assert faults < PAGES // 100
    assert run("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_blocks_are_given_back_when_that_is_asked_for():
    def given_back(**environment: str) -> int:
        command = [sys.executable, "-c", BELOW_WHAT_IS_USED, heap.__file__]
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        return int(subprocess.run(command, env=mine | environment, capture_output=True, text=True, check=True).stdout)

    assert given_back() > 0.9 * 4 * 20_000_000
    assert given_back(MALLOC_MMAP_THRESHOLD_="33554432") < 20_000_000
