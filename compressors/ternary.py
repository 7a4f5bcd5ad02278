"""A sign and a place for each of the few largest numbers: seven bits apiece where a tenth is sent.

Body of a segment of d elements with k slots (``count`` = k = ratio * d, rounded to nearest, in [1, d])::

    0              4    n, how many slots count, 0 <= n <= k
    4              4    zero
    8              t*s  means, numbers of the layout's dtype (s = 4 or 8 bytes), one for each of t = ceil(d / 4096)
                        tiles: the mean magnitude of what is sent of the tile, >= 0 (0 where that is nothing)
    8 + t*s        ...  ends, uint32: how many slots lie in the first, the first two, ... tiles; t - 1 of them, for in
                        all tiles lie n
    behind them    ...  uppers, k // 32 + t + ceil(ceil(d / 2^l) / 32) words, uint32. A tile's begin at word
                        e // 32 + i * (2^(7 - l) + 1), where i tiles and e slots are before it: bit j + g is set if its
                        j-th slot (from 0) is an element of its g-th group of 2^l elements
    behind them    ...  lowers, k * (l + 1) // 32 + t words, uint32. A tile's begin at word e * (l + 1) // 32 + i, l + 1
                        bits a slot: the element's place in its group, ascending within a group, and above it the sign,
                        1 = negative

Places are coded as by Elias (Journal of the ACM 1974) and Fano (1971), in half a bit more than the least that any code
takes for a place: l is the greatest number, 7 at most, for which there are more groups than slots. Bits count from the
lowest; those of which nothing is said are zero. Two words a tile are what it costs that tiles begin with words of their
own, so that they can be written side by side.

An element decodes to its tile's mean with its sign, all others to zero. A zero is never sent, so n < k where fewer than
k numbers are non-zero. Ends, groups, places or means that cannot be are malformed.

The sum behind a mean has a fixed shape, so that backends agree bit for bit: the magnitudes that are sent of a tile, in
order and each divided by 4096, go into 64 lanes in float64 (lane = number in the tile mod 64); lanes are added by
halving (lane i and i + 32, then i and i + 16, ...); the sum is divided by their number, multiplied by 4096 and rounded
to the layout's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.base import DAMPED, Traits
from espresso.compressors.sparse import PREFIX_BYTES, Selection, Sparsifier, num_slots

TILE = 4096
"""Elements that share a mean."""

MOST_BITS = 7
"""Of a place in a group."""

LANES = 64


# Kernels compile each of these by itself: none may call another.


def num_tiles(numel: int) -> int:
    """How many means a body has."""
    return (numel + TILE - 1) // TILE


def tile_ends_at(numel: int, itemsize: int) -> int:
    """Where in a body the ends begin, in bytes."""
    return PREFIX_BYTES + itemsize * ((numel + TILE - 1) // TILE)


def place_bits(numel: int, k: int) -> int:
    """l, the bits of a place in a group of 2^l elements."""
    bits = 0
    while bits < MOST_BITS and k << (bits + 1) < numel:
        bits += 1
    return bits


def uppers_at(numel: int, itemsize: int) -> int:
    """Where in a body the uppers begin, in bytes, if it is not empty."""
    return PREFIX_BYTES - 4 + (itemsize + 4) * ((numel + TILE - 1) // TILE)


def num_uppers(numel: int, k: int, bits: int) -> int:
    """How many words of them there are."""
    return k // 32 + (numel + TILE - 1) // TILE + (((numel + (1 << bits) - 1) >> bits) + 31) // 32


def num_lowers(numel: int, k: int, bits: int) -> int:
    """How many words of lowers there are, behind the uppers."""
    return k * (bits + 1) // 32 + (numel + TILE - 1) // TILE


def first_upper(before: int, tile: int, bits: int) -> int:
    """A tile's first word of uppers; ``before``: slots of the tiles before it."""
    return before // 32 + tile * ((TILE >> bits) // 32 + 1)


def first_lower(before: int, tile: int, bits: int) -> int:
    """A tile's first word of lowers."""
    return before * (bits + 1) // 32 + tile


@dataclass(frozen=True)
class SparseTernary(Sparsifier):
    """Sends signs of the largest numbers and how large they are on average: 0.66 bits an element where a tenth is sent.

    Sparse ternary compression (STC): Sattler, Wiedemann, Müller, Samek: Robust and Communication-Efficient Federated
    Learning from Non-IID Data, IEEE TNNLS 2020.

    The largest numbers of a gradient are nearly alike in magnitude, so that their signs owe what their values do
    (docs/convergence.md), in a seventh of a sparsifier's bytes.

    Deviations from the paper: it takes one mean per tensor, this one one per 4096 elements; it codes distances between
    places by Golomb, this one places by Elias and Fano, which decode side by side; and the k largest are found as
    :class:`espresso.compressors.sparse.Dgc` does, by a sampled threshold: the top n, 0.8 k <= n <= k.

    Attributes:
        ratio: k / d, in (0, 1].
        sample: the part of a segment that is sampled, in (0, 1]; small segments are sampled more densely.
    """

    name: ClassVar[str] = "stc"
    traits: ClassVar[Traits] = Traits(exact_size=False, sparse=True, feedback_gain=DAMPED)
    algorithm: ClassVar[int] = 17
    is_ternary: ClassVar[bool] = True

    ratio: float = 0.05
    sample: float = 0.01
    least = 1
    k = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_float("sample", above=0.0)

    @property
    def raw_limit(self) -> int:
        """Segments with fewer elements travel raw."""
        return self.raw_below

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """k, and the body of k slots."""
        k = num_slots(numel, self.ratio)
        bits = place_bits(numel, k)
        return k, uppers_at(numel, itemsize) + 4 * (num_uppers(numel, k, bits) + num_lowers(numel, k, bits))

    def selection(self) -> Selection:
        """As DGC's."""
        return Selection(part=self.sample, slack=0.0, enough=0.8, attempts=10, exact=False)
