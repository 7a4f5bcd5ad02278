"""What torch calls a process group that only its members make: after a number, which must be new and theirs alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.distributed_c10d as torch_groups

_NAMED_AFTER = {0}
"""The numbers that groups of this process were named after, the living and the dead."""


def highest_number() -> int:
    """No group of this process has a higher one."""
    world = torch_groups._world
    return max(len(world.pg_names), world.group_count, *_NAMED_AFTER)


@contextmanager
def named_after(number: int) -> Iterator[None]:
    """Have torch name a group that only its members make after this number.

    It takes the number of groups that a rank is in, or, from 2.14 on, how many it has seen made, these among them.
    Ranks that differ in it would wait for each other under different names: here, and from 2.14 on in the next group of
    all, which others count too. And a name that comes again leads to the addresses of a dead group, which the store
    keeps.
    """
    world = torch_groups._world
    names: dict[Any, Any] = world.pg_names
    others, counted = [object() for _ in range(number - len(names))], world.group_count
    names |= {other: f"espresso {id(other)}" for other in others}
    world.group_count = number
    try:
        yield
    finally:
        world.group_count = counted
        for other in others:
            names.pop(other, None)
        _NAMED_AFTER.add(number)
