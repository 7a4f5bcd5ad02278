"""Bfloat16 on the host. Format: :mod:`espresso.compressors.bf16`."""

from __future__ import annotations

from typing import ClassVar

from espresso.cpu_offload.casts import HostCast


class HostBf16(HostCast):
    """``bf16``."""

    is_half: ClassVar[bool] = False
