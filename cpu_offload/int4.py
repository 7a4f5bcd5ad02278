"""int4 on the host. Format: :mod:`espresso.compressors.blockwise`; passes: :mod:`espresso.cpu_offload.blockwise`."""

from __future__ import annotations

from espresso.cpu_offload.blockwise import HostBlockwise


class HostInt4(HostBlockwise):
    """``int4``."""
