"""Codecs on made-up numbers, before they are needed: to compile their kernels, and to measure what they cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import (
    Array,
    Decoding,
    DitheringCodec,
    DrawKey,
    Encoding,
    Feedback,
    Segment,
    SummableCodec,
)

GAIN = 0.5
"""Of the feedback: any but 1, since encoders that do not fuse it then take one more pass."""

DRAWS = 7
"""Steps whose draws an encoder meets in turn: an unlucky sample costs ``dgc`` three passes instead of one."""

Step = Callable[[], object]
Here = Callable[[Array], Any]
"""Brings an array of the host to where a codec works."""


class _Factors(dict[str, Any]):
    """What a codec of several rounds keeps from step to step."""

    read, write = dict.get, dict.__setitem__


def rehearse(
    codec: Any,
    segments: Sequence[Segment],
    dtype: npt.DTypeLike = np.float32,
    *,
    rows: int = 2,
    scale: float = 1.0,
    vectors: bool = False,
    here: Here = lambda array: array,
) -> tuple[Step, ...]:
    """An encode and a decode (and a transform, with several rounds) that have run and can be called again.

    Args:
        codec: on any backend.
        rows: payloads that the decode adds up.
        scale: of the decode.
        vectors: also run what goes to and from the vector of a summable codec, and what rounds without bias.
    """
    layout = codec.compressor.layout(segments, dtype)
    starts = np.cumsum(layout.numels) - layout.numels
    numbers = np.random.default_rng(0).standard_normal(layout.num_elements, np.float32).astype(layout.dtype, copy=False)
    old, new, target = (here(np.zeros_like(numbers)) for _ in range(3))
    feedback = Feedback(old, new, starts, GAIN) if codec.compressor.traits.error_feedback else None
    encoding = Encoding(layout, here(numbers), starts, feedback=feedback)
    decoding = Decoding(layout, target, starts, scale)
    if codec.compressor.traits.rounds > 1:
        factors = _Factors()
        first, second = (here(np.zeros(codec.num_values(layout, number), layout.dtype)) for number in (0, 1))
        encode = partial(codec.encode_values, encoding, first, factors)
        transform = partial(codec.transform_values, layout, first, second, feedback=feedback)
        decode = partial(codec.decode_values, decoding, first, second, factors)
        for step in (encode, transform, decode) * 2:  # from the second on it starts from the last Q
            step()
        return encode, decode, transform
    payloads = here(np.zeros((rows, layout.num_bytes), np.uint8))
    draws = itertools.cycle([replace(encoding, key=DrawKey(step=step)) for step in range(DRAWS)])

    def encode_next() -> object:
        return codec.encode(next(draws), payloads[0])

    encode_next()
    payloads[1:] = payloads[0]
    codec.decode(decoding, payloads)
    if vectors and isinstance(codec, SummableCodec):
        kind = codec.value_dtype(layout)
        values = here(np.zeros(codec.num_values(layout), np.uint16 if kind == "bfloat16" else kind))
        codec.encode_values(encoding, values)
        codec.decode_values(decoding, values)
    if vectors and isinstance(codec, DitheringCodec):
        codec.dither(replace(encoding, source=target))
    return encode_next, partial(codec.decode, decoding, payloads)


def warm_up(
    codec: Any,
    dtypes: Sequence[npt.DTypeLike] = (np.float32,),
    *,
    sizes: Sequence[int] = (1, 5000),
    here: Here = lambda array: array,
) -> None:
    """Compile a codec's kernels for these layout dtypes (or read them from the cache).

    Args:
        codec: on any backend; call this at registration, before anything waits for a payload.
        sizes: of the segments; a codec of several rounds takes a matrix and a vector.
    """
    shapes = [(64, 64), (3,)] if codec.compressor.traits.rounds > 1 else [(size,) for size in sizes]
    segments = [Segment(f"warm-up {index}", 0, int(np.prod(shape)), shape) for index, shape in enumerate(shapes)]
    for dtype in dtypes:
        rehearse(codec, segments, dtype, vectors=True, here=here)
