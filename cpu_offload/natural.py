"""Natural compression on the host. Format: :mod:`espresso.compressors.natural`; passes: ``level_kernels``."""

from __future__ import annotations

from typing import ClassVar

from espresso.compressors.natural import TOP_EXPONENT, UNIT_LEVEL
from espresso.cpu_offload.levels import HostLevels


class HostNatural(HostLevels):
    """``natural``."""

    top_exponent: ClassVar[int | None] = TOP_EXPONENT
    unit_level: ClassVar[int | None] = UNIT_LEVEL
