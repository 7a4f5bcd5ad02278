"""Half precision on the host. Format: :mod:`espresso.compressors.fp16`."""

from __future__ import annotations

from typing import ClassVar

from espresso.cpu_offload.casts import HostCast


class HostFp16(HostCast):
    """``fp16``."""

    is_half: ClassVar[bool] = True
