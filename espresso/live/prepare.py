"""The kernels of a job: compiled before its first step, or in a process beside its first ones, one for each host.

::

    first rank of a host   1 are they on disk? ── no ──> 2 a process compiles, and leaves them there
    every rank             trains plainly ............... 3 all processes are over? ──> 4 read, one rank after the other

``python -m espresso.live.prepare`` is the process; it reads what to compile from its input.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import espresso
from espresso.jit.kernels import NotKeptError, only_kept
from espresso.live.codecs import HostCodecs
from espresso.strategies import CompressorSpec

if TYPE_CHECKING:
    from espresso.comm.groups import Groups

logger = logging.getLogger("espresso")

NICE = 5
"""The process gives way to training where they share a core, and is not starved by it."""

END_S = 5.0
"""For the process to end when it is told to."""


LOOK_EVERY = 8
"""Steps between two looks at whether they are over; all ranks wait for the answer."""


class Kernels:
    """What a job compiles. All its methods but ``end`` are collective.

    Args:
        specs: compressors whose kernels the job may run.
        dtypes: of its gradients.
        goes_first: whether this rank is its host's first; the others find what that one left on disk.
    """

    def __init__(
        self,
        groups: Groups,
        codecs: HostCodecs,
        specs: Iterable[CompressorSpec],
        dtypes: Iterable[str],
        goes_first: bool,
    ) -> None:
        self._groups, self._codecs, self._goes_first = groups, codecs, goes_first
        self._specs, self._dtypes = sorted(specs, key=str), sorted(dtypes)
        self._process: subprocess.Popen[str] | None = None
        self._began = time.monotonic()

    def compile(
        self, more: Callable[[list[CompressorSpec], list[str]], object] | None = None, *, searches: bool = False
    ) -> None:
        """Have them before this returns, one rank of each host first; then ``more``."""
        for turn in (True, False):
            if self._goes_first is turn:
                compile_kernels(self._codecs, self._specs, self._dtypes, searches and self._groups.rank == 0)
                if more is not None:
                    more(self._specs, self._dtypes)
            self._groups.barrier(patient=True)
            if self._groups.beside is not None:  # the host's first may be another shard's
                self._groups.beside.barrier(patient=True)

    def begin(self) -> bool:
        """Have them if they are on disk everywhere; else begin to compile them, and return False."""
        if self._goes_first:
            try:
                with only_kept():
                    compile_kernels(self._codecs, self._specs, self._dtypes, self._groups.rank == 0)
            except NotKeptError:
                self._process = self._compiling()
        if all(self._groups.everywhere(self._process is None)):
            self.compile()
            return True
        if self._groups.speaks:
            logger.info("kernels are compiled while plain steps run; automatic mode begins when they are there")
        return False

    def are_there(self) -> bool:
        """Whether what ``begin`` began is over; then this rank has them too."""
        is_over = self._process is None or self._process.poll() is not None
        if not all(self._groups.everywhere(is_over)):
            return False
        self.compile(searches=True)  # what a process did not compile is compiled here
        if self._groups.speaks:
            logger.info("kernels are there, after %.0f s", time.monotonic() - self._began)
        return True

    def end(self) -> None:
        """Stop what was begun."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _compiling(self) -> subprocess.Popen[str] | None:
        """The process; None where the system does not let us have one."""
        asked = {
            "specs": [str(spec) for spec in self._specs], "dtypes": self._dtypes,
            "threads": self._codecs.pool.num_threads, "searches": self._groups.rank == 0,
        }  # fmt: skip
        path = filter(None, [str(Path(espresso.__file__).parents[1]), os.environ.get("PYTHONPATH")])
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__], env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        except OSError as error:
            logger.info("no process to compile kernels in (%s)", error)
            return None
        assert process.stdin is not None
        with suppress(OSError), process.stdin as pipe:
            pipe.write(json.dumps(asked))
        return process


def compile_kernels(codecs: HostCodecs, specs: Iterable[CompressorSpec], dtypes: Iterable[str], searches: bool) -> None:
    """Compile the kernels of codecs, and those of the search, or read them from disk."""
    if searches:
        from espresso.search.rehearsal import rehearse

        rehearse()
    codecs.warm_up(specs, dtypes)


def main() -> None:
    """Compile what is asked for on the standard input."""
    os.nice(NICE)
    asked = json.load(sys.stdin)
    codecs = HostCodecs(asked["threads"], 1)
    compile_kernels(codecs, map(CompressorSpec.parse, asked["specs"]), asked["dtypes"], asked["searches"])
    codecs.close()


if __name__ == "__main__":
    main()
