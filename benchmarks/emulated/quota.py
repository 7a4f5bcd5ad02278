"""A part of a core: the kernel's control groups for processors (version 1)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000


@contextmanager
def processor_quota(share: float, name: str) -> Iterator[Path]:
    """A group of processes that together have so much of a core; yields the file that takes their pids.

    What is still in it at the end is set free.

    Raises:
        OSError: there are no such groups here, or no permission to make one.
    """
    group = GROUPS / f"espresso-{os.getpid()}-{name}"
    group.mkdir()
    members = group / "cgroup.procs"
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * share)))
        yield members
    finally:
        for pid in members.read_text().split():
            with suppress(ProcessLookupError):
                (GROUPS / "cgroup.procs").write_text(pid)
        group.rmdir()
