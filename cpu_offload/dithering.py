"""Dithering on the host. Format: :mod:`espresso.compressors.dithering`; passes: :mod:`espresso.cpu_offload.levels`."""

from __future__ import annotations

from espresso.cpu_offload.levels import HostLevels


class HostDithering(HostLevels):
    """``dithering``."""
