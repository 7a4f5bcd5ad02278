"""Mutated checkpoints against their reader: a checkpoint that fits the model, or CheckpointError, and nothing else."""

from __future__ import annotations

import pickle
import random
import time
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.fuzz_files import MEGABYTES, ODD, SECONDS, TENSORS, Tally, TooSlowError, limits, places, sound_strategy
from espresso.comm.errors import ProtocolError
from espresso.comm.keep.residual import Loan
from espresso.comm.keep.store import Stretch
from espresso.comm.messages import PLAIN
from espresso.live.checkpoint import Checkpoint
from espresso.live.parts import FACTOR, RESIDUAL, VELOCITY, CheckpointError, Part, Place, cut
from espresso.strategies import Cluster, Site

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
def _sound() -> tuple[dict[str, Any], dict[str, Any]]:
    """One rank's checkpoint, and all ranks'."""

    def stretch(tensor: str, site: Site | None, start: int, numel: int) -> Stretch:
        return Stretch(tensor, site, start, numel, 0, Loan(np.ones(numel, np.float32)))

    def parts(rank: int) -> dict[int, Part]:
        numbers = Place(rank, 2).parts
        local = [stretch("head.weight", Site.LOCAL, 0, 100), stretch("head.weight", Site.FLAT_SECOND, 200, 64)]
        kept = [(RESIDUAL, s) for s in [*local, stretch("head.bias", None, 0, 512)]] + [(VELOCITY, local[0])]
        return dict(zip(numbers, cut(kept, len(numbers)), strict=True))

    factors = Part([(FACTOR, stretch("head.weight", None, 0, 640))])
    mine = Checkpoint(TENSORS, (2, 1), 7, None, sound_strategy(), factors, parts(0))
    everybody = replace(mine, parts=parts(0) | parts(1))
    return pickle.loads(pickle.dumps(mine.to_dict())), pickle.loads(pickle.dumps(everybody.to_dict()))


def _odd_part(draw: random.Random) -> torch.Tensor:
    """A part whose rows are odd, or whose bytes are."""
    row = ["residual", "head.weight", "local", 0, np.ones(3, np.float32)]
    row[draw.randrange(5)] = draw.choice([*ODD, np.full(3, np.nan), np.ones(3, np.int64), np.ones((2, 2)), b"bytes"])
    try:
        packed = torch.from_numpy(PLAIN.pack(draw.choice([[tuple(row)], tuple(row), row, [row, row], {"a": row}])))
    except (TypeError, ProtocolError, UnicodeEncodeError):
        packed = torch.from_numpy(PLAIN.pack([tuple(row[:4])]) if isinstance(row[0], str) else PLAIN.pack(3))
    if draw.random() < 0.3:
        packed[draw.randrange(packed.numel())] = draw.randrange(256)
    return packed


def _mutated(draw: random.Random) -> Any:
    body = deepcopy(draw.choice(_sound()))
    if draw.random() < 0.5:
        body["parts"][draw.choice(["0", "1", "300"])] = _odd_part(draw)
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


def _take(body: Any) -> None:
    Checkpoint.parse(body).found(Place(0, 2), Cluster(2, 1), TENSORS).kept()


def _load_spoilt_bytes(draw: random.Random) -> None:
    """Bytes of a part that changed on the way."""
    body = deepcopy(_sound()[0])
    key = draw.choice([key for key, part in body["parts"].items() if part.numel() > 100])
    data = bytearray(body["parts"][key].numpy().tobytes())
    for _ in range(draw.randint(1, 6)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    if draw.random() < 0.3:
        del data[draw.randrange(len(data)) :]
    body["parts"][key] = torch.tensor(data, dtype=torch.uint8)
    _take(body)


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
