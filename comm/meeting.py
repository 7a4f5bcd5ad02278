"""How the ranks of a job find each other before any of their groups is made: through the job's store, apart from
collectives, so that who does not come, or stays away, is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_groups

from espresso.comm.errors import DisagreementError, LostRankError
from espresso.comm.group_names import highest_number
from espresso.comm.messages import PLAIN
from espresso.comm.nodes import compact
from espresso.comm.witness import worded

_AWAY = "away"
"""In place of a card, before the ranks that are off."""


@dataclass(frozen=True)
class Meeting:
    """All ranks have come.

    Attributes:
        cards: everybody's, in rank order.
        number: none of their groups was named after a higher one: see :func:`espresso.comm.group_names.named_after`.
        forget: takes this rank's card out of the store, once everybody has read it.
    """

    cards: list[Sequence[Any]]
    number: int
    forget: Callable[[], object]


def meet(group: Any, card: Sequence[Any], timeout_s: float, before: Any) -> Meeting:
    """Find everybody.

    Args:
        group: the ranks that are to meet.
        card: what the others are to know of this one: plain values.
        before: the process group that this rank meets next; if a rank is off here, those hear of it there.

    Raises:
        LostRankError: ranks did not come in time, or the store does not answer.
        DisagreementError: ranks stay away.
    """
    store, rank = torch_groups._get_default_store(), dist.get_rank(group)
    keys, missing = list[str](), list[int]()
    try:
        times = store.add(_times_met(group, rank), 0)
        ranks = dist.get_process_group_ranks(group)
        keys = [_card_key(group, times, each) for each in range(len(ranks))]
        store.set(keys[rank], PLAIN.pack((highest_number(), *card)).tobytes().hex())
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:
            missing = [each for each, key in zip(ranks, keys, strict=True) if not store.check([key])]
        texts = [] if missing else [store.get(key).decode() for key in keys]
        if texts:
            store.add(_times_met(group, rank), 1)
    except RuntimeError as error:
        raise LostRankError(
            f"the job's store does not answer ({worded(error)}); it ended with the launcher, or with rank 0"
        ) from error
    if missing:
        raise LostRankError(
            f"{_ranks(missing)} did not come to espresso.register within {timeout_s:g} s; all ranks call it together"
        )
    away = sorted({int(each) for text in texts if text.startswith(_AWAY) for each in text.split()[1:]})
    if away:
        if before is not None:
            stay_away(before, away)
        raise DisagreementError(
            f"espresso is off on {_ranks(away)} (ESPRESSO_DISABLE) and not on rank {dist.get_rank()}: set it on all"
            " ranks or on none"
        )
    told = [PLAIN.unpack(np.frombuffer(bytes.fromhex(text), np.uint8)) for text in texts]
    return Meeting(
        [card for _, *card in told], max(number for number, *_ in told), partial(store.delete_key, keys[rank])
    )


def stay_away(process_group: dist.ProcessGroup, off: Sequence[int] = ()) -> None:
    """Tell the ranks that meet now that this one does not come. Waits for nobody.

    Args:
        off: the ranks because of which; none: this one is off itself.
    """
    rank = dist.get_rank(process_group)
    with suppress(RuntimeError, AttributeError):  # without a store they wait, and name it then
        store = torch_groups._get_default_store()
        times = store.add(_times_met(process_group, rank), 1) - 1
        store.set(_card_key(process_group, times, rank), " ".join(map(str, (_AWAY, *(off or [dist.get_rank()])))))


def _times_met(group: Any, rank: int) -> str:
    """Where a rank counts how often it has met the others of a group, or stayed away; only it reads that."""
    return f"espresso/{group.group_name}/met/{rank}"


def _card_key(group: Any, times: int, rank: int) -> str:
    """Where a rank leaves its card: what it left an earlier time is not taken for it."""
    return f"espresso/{group.group_name}/{times}/{rank}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {compact(ranks)}"
