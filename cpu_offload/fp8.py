"""FP8 on the host. Format: :mod:`espresso.compressors.fp8`; passes: :mod:`espresso.cpu_offload.blockwise`."""

from __future__ import annotations

from espresso.cpu_offload.blockwise import HostBlockwise


class HostFp8(HostBlockwise):
    """``fp8``."""
