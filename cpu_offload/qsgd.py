"""QSGD on the host. Format: :mod:`espresso.compressors.qsgd`; passes: :mod:`espresso.cpu_offload.levels`."""

from __future__ import annotations

from espresso.cpu_offload.levels import HostLevels


class HostQsgd(HostLevels):
    """``qsgd``."""
