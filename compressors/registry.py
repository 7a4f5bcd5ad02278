"""Compressor ids: where the parameters live and where each backend's codec lives.

A new compressor is a file in ``compressors/``, a twin in ``cpu_offload/`` and a line in ``_ENTRIES``.
Modules are named by strings and imported on first use: this package never imports ``cpu_offload``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from espresso.compressors.base import Codec, Compressor
from espresso.strategies import CompressorSpec


@dataclass(frozen=True, slots=True)
class Entry:
    """``module:class`` of the parameters, of the host codec and of the GPU codec (empty: there is none yet)."""

    compressor: str
    host: str
    cuda: str = ""


_ENTRIES = {
    "none": Entry(
        "espresso.compressors.none:NoCompression",
        "espresso.cpu_offload.none:HostNone",
        "espresso.compressors.cuda.none:CudaNone",
    ),
    "fp16": Entry(
        "espresso.compressors.fp16:Fp16",
        "espresso.cpu_offload.fp16:HostFp16",
        "espresso.compressors.cuda.casts:CudaFp16",
    ),
    "bf16": Entry(
        "espresso.compressors.bf16:Bf16",
        "espresso.cpu_offload.bf16:HostBf16",
        "espresso.compressors.cuda.casts:CudaBf16",
    ),
    "int8": Entry(
        "espresso.compressors.int8:Int8",
        "espresso.cpu_offload.int8:HostInt8",
        "espresso.compressors.cuda.blockwise:CudaBlockwise",
    ),
    "int4": Entry(
        "espresso.compressors.int4:Int4",
        "espresso.cpu_offload.int4:HostInt4",
        "espresso.compressors.cuda.blockwise:CudaBlockwise",
    ),
    "efsignsgd": Entry(
        "espresso.compressors.efsignsgd:EfSignSgd",
        "espresso.cpu_offload.efsignsgd:HostEfSignSgd",
        "espresso.compressors.cuda.signs:CudaSigns",
    ),
    "onebit": Entry(
        "espresso.compressors.onebit:OneBit",
        "espresso.cpu_offload.onebit:HostOneBit",
        "espresso.compressors.cuda.signs:CudaSigns",
    ),
    "topk": Entry(
        "espresso.compressors.topk:TopK",
        "espresso.cpu_offload.topk:HostTopK",
        "espresso.compressors.cuda.sparse:CudaTopK",
    ),
    "dgc": Entry(
        "espresso.compressors.dgc:Dgc",
        "espresso.cpu_offload.dgc:HostDgc",
        "espresso.compressors.cuda.sparse:CudaDgc",
    ),
    "randomk": Entry(
        "espresso.compressors.randomk:RandomK",
        "espresso.cpu_offload.randomk:HostRandomK",
        "espresso.compressors.cuda.randomk:CudaRandomK",
    ),
    "threshold": Entry(
        "espresso.compressors.threshold:Threshold",
        "espresso.cpu_offload.threshold:HostThreshold",
        "espresso.compressors.cuda.sparse:CudaThreshold",
    ),
    "fp8": Entry(
        "espresso.compressors.fp8:Fp8",
        "espresso.cpu_offload.fp8:HostFp8",
        "espresso.compressors.cuda.blockwise:CudaBlockwise",
    ),
    "qsgd": Entry(
        "espresso.compressors.qsgd:Qsgd",
        "espresso.cpu_offload.qsgd:HostQsgd",
        "espresso.compressors.cuda.levels:CudaLevels",
    ),
    "dithering": Entry(
        "espresso.compressors.dithering:Dithering",
        "espresso.cpu_offload.dithering:HostDithering",
        "espresso.compressors.cuda.levels:CudaLevels",
    ),
    "natural": Entry(
        "espresso.compressors.natural:Natural",
        "espresso.cpu_offload.natural:HostNatural",
        "espresso.compressors.cuda.levels:CudaNatural",
    ),
    "terngrad": Entry(
        "espresso.compressors.terngrad:TernGrad",
        "espresso.cpu_offload.terngrad:HostTernGrad",
        "espresso.compressors.cuda.levels:CudaLevels",
    ),
    "powersgd": Entry(
        "espresso.compressors.powersgd:PowerSgd",
        "espresso.cpu_offload.powersgd:HostPowerSgd",
        "espresso.compressors.cuda.powersgd:CudaPowerSgd",
    ),
}


def compressor_ids() -> tuple[str, ...]:
    """The ids that :func:`create` knows, in the order of the registry."""
    return tuple(_ENTRIES)


def create(spec: str | CompressorSpec) -> Compressor:
    """Make a compressor from ``name`` or ``name:key=value,key=value``.

    Raises:
        ValueError: an unknown id (says which exist) or parameter (says which it has), or a value out of range.

    Example:
        >>> create("topk:ratio=0.02")
        TopK(raw_below=256, ratio=0.02)
    """
    parsed = CompressorSpec.parse(spec) if isinstance(spec, str) else spec
    kind = _load(_entry(parsed.name).compressor)
    known = [field.name for field in fields(kind)]
    unknown = [key for key, _ in parsed.params if key not in known]
    if unknown:
        raise ValueError(f"compressor {parsed.name} has no parameter {unknown[0]!r}; it has {', '.join(known)}")
    compressor: Compressor = kind(**dict(parsed.params))
    return compressor


def spec_of(compressor: Compressor) -> CompressorSpec:
    """The spec that :func:`create` turns into an equal compressor."""
    return CompressorSpec(compressor.name, tuple(compressor.params().items()))


def host_codec(compressor: Compressor, pool: Any = None) -> Codec:
    """The Numba codec of a compressor.

    Args:
        compressor: of a registered id.
        pool: an ``espresso.cpu_offload.WorkerPool``; None encodes and decodes on the calling thread.
    """
    codec: Codec = _load(_entry(compressor.name).host)(compressor, pool)
    return codec


def cuda_codec(compressor: Compressor, device: Any) -> Codec:
    """The GPU codec of a compressor.

    Args:
        compressor: of a registered id.
        device: an ``espresso.compressors.cuda.Device``.

    Raises:
        ValueError: this compressor has no GPU codec.
    """
    entry = _entry(compressor.name)
    if not entry.cuda:
        raise ValueError(
            f"compressor {compressor.name} has no GPU codec in this version: choose options that compress on the host"
            f" (offload), or one of {', '.join(name for name, other in _ENTRIES.items() if other.cuda)}"
        )
    codec: Codec = _load(entry.cuda)(compressor, device)
    return codec


def _entry(name: str) -> Entry:
    entry = _ENTRIES.get(name)
    if entry is None:
        raise ValueError(f"no compressor {name!r}; known: {', '.join(_ENTRIES)}")
    return entry


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
