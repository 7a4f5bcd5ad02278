"""Mutated checkpoints against their reader: a checkpoint that fits the model, or CheckpointError, and nothing else."""

from __future__ import annotations

import io
import random
import time
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.fuzz_files import MEGABYTES, ODD, SECONDS, TENSORS, Tally, TooSlowError, limits, places, sound_strategy
from espresso.live.checkpoint import Checkpoint, CheckpointError, Kept, Stored
from espresso.live.state import PerRank
from espresso.strategies import Site

MODEL = "the model's digest"
ODD_TENSORS = (
    lambda: torch.zeros(3),
    lambda: torch.zeros(512),
    lambda: torch.full((512,), float("nan")),
    lambda: torch.zeros(512, device="meta"),
    lambda: torch.zeros(512, dtype=torch.int64),
    lambda: torch.zeros(512, dtype=torch.complex64),
    lambda: torch.zeros(512, dtype=torch.bfloat16),
    lambda: torch.zeros(512, dtype=torch.bool),
    lambda: torch.zeros(512).to_sparse(),
    lambda: torch.zeros(()),
    lambda: torch.zeros(0),
    lambda: torch.zeros(8, 64),
    lambda: torch.zeros(512, requires_grad=True),
    lambda: torch.zeros(1).expand(1 << 40),
)


def _circle() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


ODD_OBJECTS: tuple[Any, ...] = (*ODD, 10**5000, b"bytes", (1, 2), {1: 2}, {None: None}, 1j, float("inf"), float("nan"))


@cache
def _sound() -> tuple[Checkpoint, Checkpoint]:
    """One rank's checkpoint, and all ranks'."""

    def kept(rank: int) -> Kept:
        rest = {("head.weight", Site.LOCAL): [(0, np.ones(100, np.float32), 0), (200, np.ones(64, np.float32), 1)]}
        carry = {"head.bias": np.ones(512, np.float32)}
        stored = Stored(rest, carry)
        factors = {"head.weight": np.ones(640, np.float32)}
        return Kept(rank, 2, MODEL, 7, None, sound_strategy(), stored, stored, factors)

    return Checkpoint((kept(0),)), Checkpoint((kept(0), kept(1)), is_gathered=True)


def _mutated(draw: random.Random) -> Any:
    body = draw.choice(_sound()).to_dict()
    for _ in range(draw.randint(1, 3)):
        found = places(body)
        if not found:
            break
        here, key = draw.choice(found)
        what = draw.randrange(8)
        if what < 2:
            here[key] = draw.choice(ODD_TENSORS)()
        elif what < 4:
            here[key] = deepcopy(draw.choice(ODD_OBJECTS))
        elif what == 4:
            here[key] = _circle()
        elif what == 5:
            del here[key]
        elif what == 6 and isinstance(here, dict):
            here[draw.choice([o for o in ODD_OBJECTS if o.__hash__ is not None])] = here.pop(key)
        else:
            other, place = draw.choice(found)
            here[key] = other.get(place) if isinstance(other, dict) else draw.choice(other or [None])
    return draw.choice(ODD_OBJECTS) if draw.random() < 0.01 else body


class _State:
    """What loads a rank's entry of a distributed checkpoint."""

    rank = 0

    def start(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return _sound()[0].to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _take(state)


def _take(body: Any) -> None:
    Checkpoint.parse(body).of(0, 2, MODEL, TENSORS)


def _load_spoilt_bytes(draw: random.Random) -> None:
    state: Any = _State()
    entry = PerRank(state).state_dict()
    ((key, buffer),) = entry.items()
    data = bytearray(buffer.getvalue())
    for _ in range(draw.randint(1, 6)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    if draw.random() < 0.3:
        del data[draw.randrange(len(data)) :]
    PerRank(state).load_state_dict({key: io.BytesIO(bytes(data))})


def run_slice(seed: int, first: int, count: int, share: float) -> dict[str, Tally]:
    """Checkpoints ``first`` to ``first + count``; one in eight is spoilt as bytes."""
    tallies = {"checkpoint": Tally(), "checkpoint's bytes": Tally()}
    _sound()
    for number in range(first, first + count):
        label = f"{seed}/{number}"
        draw = random.Random(label)
        as_bytes = number % 8 == 0
        tally = tallies["checkpoint's bytes" if as_bytes else "checkpoint"]
        body = None if as_bytes else _mutated(draw)
        begin = time.process_time()
        try:
            with limits(SECONDS, MEGABYTES):
                if as_bytes:
                    _load_spoilt_bytes(draw)
                else:
                    _take(body)
            tally.outcomes["loaded"] += 1
        except CheckpointError:
            tally.outcomes["refused"] += 1
        except (Exception, TooSlowError) as error:
            tally.outcomes["wrong"] += 1
            tally.wrong.append({"kind": "checkpoint", "seed": label, "error": f"{type(error).__name__}: {error}"[:300]})
        tally.slowest_s = max(tally.slowest_s, time.process_time() - begin)
    return tallies
