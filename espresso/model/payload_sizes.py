"""How many bytes payloads and rounds take, from the compressors' own layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from espresso.model.links import JobError
from espresso.strategies import DTYPES, NONE, Choice, CompressorSpec, Strategy, TensorSpec
from espresso.strategies.flow import SHARD_ALIGN

if TYPE_CHECKING:
    from espresso.compressors.base import Compressor

PayloadBytes = Callable[[CompressorSpec, int, str, int], int]
"""``(spec, elements, dtype, segments) -> bytes`` of one payload."""


@lru_cache(maxsize=256)
def create_compressor(spec: CompressorSpec) -> Compressor:
    """The registry's compressor for a spec, made once."""
    # Here and not above: pricing is the only reason to load the compressors.
    from espresso.compressors.registry import create

    return create(spec)


@lru_cache(maxsize=1 << 16)
def _layout_bytes(spec: CompressorSpec, numels: tuple[int, ...], dtype: str) -> int:
    from espresso.compressors.base import Segment
    from espresso.compressors.payload import MAX_SEGMENT

    if max(numels) >= MAX_SEGMENT:
        raise JobError(
            f"{max(numels)} elements would travel in one payload, which holds {MAX_SEGMENT - 1} at most:"
            " ask for smaller buckets or partitions"
        )
    segments, start = [], 0
    for numel in numels:
        segments.append(Segment("", start, numel))
        start += numel
    return create_compressor(spec).layout(segments, dtype).num_bytes


Shapes = tuple[tuple[int, ...], ...]
Stretches = int | Shapes
"""What a group consists of: how many stretches of tensors, or the shapes of whole ones where those matter."""


def count_of(stretches: Stretches) -> int:
    """How many stretches."""
    return stretches if isinstance(stretches, int) else len(stretches)


@lru_cache(maxsize=1 << 12)
def round_bytes(spec: CompressorSpec, elements: int, dtype: str, stretches: Stretches, number: int) -> int:
    """Bytes of the vector of one round; where no shapes are known, those of a square matrix of so many elements."""
    from espresso.compressors.base import Segment

    side = max(math.isqrt(elements), 1)
    shapes: Shapes = ((side, -(-elements // side)),) if isinstance(stretches, int) else stretches
    compressor: Any = create_compressor(spec)
    wide = "float64" if dtype == "float64" else "float32"
    layout = compressor.layout([Segment("", 0, math.prod(shape), shape) for shape in shapes], wide)
    return int(compressor.num_values(layout, number) * layout.dtype.itemsize)


@lru_cache(maxsize=1 << 14)
def travels_raw(spec: CompressorSpec, shape: tuple[int, ...]) -> bool:
    """Whether a payload holds a whole tensor's plain numbers: it is too small for the compressor, or no matrix."""
    from espresso.compressors.base import Segment
    from espresso.compressors.payload import MAX_SEGMENT

    numel = math.prod(shape)
    return numel < MAX_SEGMENT and bool(create_compressor(spec).layout([Segment("", 0, numel, shape)]).raw[0])


def compressed(strategy: Strategy) -> list[TensorSpec]:
    """The tensors that do not travel as plain numbers: some are too small for the compressor that they have."""
    return [tensor for tensor in strategy.tensors if _is_compressed(strategy.choices[tensor.name], tensor)]


def offloaded(strategy: Strategy) -> list[TensorSpec]:
    """Those of them that the offload pool works on."""
    return [tensor for tensor in compressed(strategy) if strategy.choices[tensor.name].option.uses_offload]


def _is_compressed(choice: Choice, tensor: TensorSpec) -> bool:
    # What is summed in one round is of one type, small tensors included.
    sums = choice.option.is_summable and choice.option.num_rounds == 1
    return choice.compressor != NONE and (sums or not travels_raw(choice.compressor, tensor.shape))


_LARGE = 1 << 16


def payload_bytes(spec: CompressorSpec, elements: int, dtype: str = "float32", segments: int = 1) -> int:
    """Bytes of a payload of ``elements`` in ``segments`` stretches, from the compressor's own layout.

    Further segments cost what a second one does in a large payload (a table row, and what it rounds up),
    so that a size needs one layout and not one for every way of cutting it.
    """
    wide = "float64" if dtype == "float64" else "float32"
    size = _layout_bytes(spec, (elements,), wide)
    if segments > 1:
        two = _layout_bytes(spec, (_LARGE // 2, _LARGE // 2), wide)
        size += (segments - 1) * max(two - _layout_bytes(spec, (_LARGE,), wide), 0)
    return size


def width_of(dtype: str, *, is_wide: bool) -> int:
    """Bytes of a number while steps run: where an option compresses (``is_wide``) 16 bits are widened to 32."""
    return max(DTYPES[dtype], 4) if is_wide else DTYPES[dtype]


def first_shard(elements: int, parts: int) -> int:
    """Elements of the first, largest shard (:func:`espresso.strategies.cut`)."""
    return min(-(-elements // (parts * SHARD_ALIGN)) * SHARD_ALIGN, elements)


def atom_sizes(elements: int, splits: tuple[int, ...]) -> dict[int, int]:
    """Size to count of the payloads that a region is encoded in; empty ones included."""
    sizes = {elements: 1}
    for parts in splits:
        finer: dict[int, int] = {}
        for size, count in sizes.items():
            first = first_shard(size, parts)
            full = size // first if first else parts
            rest = size - full * first
            for piece, times in ((first, full), (rest, 1 if rest else 0)):
                finer[piece] = finer.get(piece, 0) + times * count
            finer[0] = finer.get(0, 0) + (parts - full - (1 if rest else 0)) * count
        sizes = {size: count for size, count in finer.items() if count}
    return sizes


def share_of_stretches(segments: Stretches, part: int, whole: int) -> int:
    """How many of a partition's segments lie in a part of it, about."""
    return max(1, -(-count_of(segments) * part // whole)) if whole else 1
