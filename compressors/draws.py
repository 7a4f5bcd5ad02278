"""What random numbers depend on, in plain Python: hashes of names, keys of draws. Both backends start from here."""

from __future__ import annotations

import hashlib

from espresso.compressors.base import DrawKey

_MASK = 2**64 - 1


def tensor_hash(name: str) -> int:
    """A stable 64-bit hash of a tensor's name, as a signed number for int64 tables."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def mix64(value: int) -> int:
    """splitmix64's finaliser, a bijection of 64-bit numbers.

    Example:
        >>> hex(mix64(1))
        '0x5692161d100b05e5'
    """
    x = value & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def salt_of(key: DrawKey) -> int:
    """The part of a key that all segments share; the rank stays out, since all ranks draw alike."""
    return mix64(mix64(mix64(key.seed) + key.step) + key.site)


def rank_salt(key: DrawKey) -> int:
    """The same with the rank, so that the errors of ranks average out."""
    return mix64(salt_of(key) + key.rank)
