"""Compressor ids: where the parameters live and where each backend's codec lives.

A new compressor is a file in ``compressors/``, a codec in ``cpu_offload/`` and a line in ``_ENTRIES``.
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
    """``module:class`` of the parameters, of the host codec and of the GPU codec (empty: there is none yet).

    The modules are those of ``compressors``, ``cpu_offload`` and ``compressors.cuda``.
    """

    compressor: str
    host: str
    cuda: str = ""


_ENTRIES = {
    "none": Entry("casts:NoCompression", "casts:HostNone", "families:CudaNone"),
    "fp16": Entry("casts:Fp16", "casts:HostCast", "families:CudaCast"),
    "bf16": Entry("casts:Bf16", "casts:HostCast", "families:CudaCast"),
    "int8": Entry("blockwise:Int8", "blockwise:HostBlockwise", "families:CudaBlockwise"),
    "int4": Entry("blockwise:Int4", "blockwise:HostBlockwise", "families:CudaBlockwise"),
    "efsignsgd": Entry("signs:EfSignSgd", "signs:HostSigns", "families:CudaSigns"),
    "onebit": Entry("signs:OneBit", "signs:HostSigns", "families:CudaSigns"),
    "topk": Entry("sparse:TopK", "sparse:HostSparse", "sparse:CudaSparse"),
    "dgc": Entry("sparse:Dgc", "sparse:HostSparse", "sparse:CudaSparse"),
    "randomk": Entry("randomk:RandomK", "randomk:HostRandomK", "families:CudaRandomK"),
    "threshold": Entry("sparse:Threshold", "sparse:HostSparse", "sparse:CudaSparse"),
    "stc": Entry("ternary:SparseTernary", "sparse:HostSparse", "sparse:CudaTernary"),
    "fp8": Entry("blockwise:Fp8", "blockwise:HostBlockwise", "families:CudaBlockwise"),
    "qsgd": Entry("levels:Qsgd", "levels:HostLevels", "families:CudaLevels"),
    "dithering": Entry("levels:Dithering", "levels:HostLevels", "families:CudaLevels"),
    "natural": Entry("levels:Natural", "levels:HostLevels", "families:CudaLevels"),
    "terngrad": Entry("levels:TernGrad", "levels:HostLevels", "families:CudaLevels"),
    "twobit": Entry("signs:TwoBit", "twobit:HostTwoBit", "families:CudaTwoBit"),
    "powersgd": Entry("powersgd:PowerSgd", "powersgd:HostPowerSgd", "powersgd:CudaPowerSgd"),
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
    kind = _load("compressors", _entry(parsed.name).compressor)
    known = [field.name for field in sorted(fields(kind), key=lambda field: bool(field.kw_only))]
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
    codec: Codec = _load("cpu_offload", _entry(compressor.name).host)(compressor, pool)
    return codec


def cuda_codec(compressor: Compressor, device: Any, *, waits: bool = True) -> Any:
    """The GPU codec of a compressor.

    Args:
        compressor: of a registered id.
        device: an ``espresso.compressors.cuda.Device``.
        waits: as for ``espresso.compressors.cuda.CudaCodec``.

    Raises:
        ValueError: this compressor has no GPU codec.
    """
    entry = _entry(compressor.name)
    if not entry.cuda:
        raise ValueError(
            f"compressor {compressor.name} has no GPU codec in this version: choose options that compress on the host"
            f" (offload), or one of {', '.join(name for name, other in _ENTRIES.items() if other.cuda)}"
        )
    return _load("compressors.cuda", entry.cuda)(compressor, device, waits=waits)


def _entry(name: str) -> Entry:
    entry = _ENTRIES.get(name)
    if entry is None:
        raise ValueError(f"no compressor {name!r}; known: {', '.join(_ENTRIES)}")
    return entry


def _load(folder: str, target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(f"espresso.{folder}.{module}"), name)
