"""Scaled sign on the host. Format: :mod:`espresso.compressors.efsignsgd`; passes: :mod:`espresso.cpu_offload.signs`."""

from __future__ import annotations

from espresso.cpu_offload.signs import HostSigns


class HostEfSignSgd(HostSigns):
    """``efsignsgd``."""
