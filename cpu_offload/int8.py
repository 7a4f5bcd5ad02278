"""int8 on the host. Format: :mod:`espresso.compressors.blockwise`; passes: :mod:`espresso.cpu_offload.blockwise`."""

from __future__ import annotations

from espresso.cpu_offload.blockwise import HostBlockwise


class HostInt8(HostBlockwise):
    """``int8``."""
