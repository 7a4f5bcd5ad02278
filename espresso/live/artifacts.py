"""Files that a run leaves for people: job, strategy, and what was decided when."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch

from espresso.comm.groups import Groups
from espresso.model.job import Job
from espresso.show.trace_events import write_history
from espresso.strategies import Strategy, fields

logger = logging.getLogger("espresso")

_JOB_PATH = "ESPRESSO_JOB_PATH"

_MODELS: dict[Path, weakref.WeakKeyDictionary[torch.nn.Module, int]] = {}
"""Models of this process that leave files at a place, each with a number of its own."""

_NUMBERS: dict[Path, set[int]] = {}
"""That some model has had: what one has left that is gone stays as it is."""


def own_folder(directory: str | os.PathLike[str] | None, model: torch.nn.Module | None, groups: Groups) -> Path | None:
    """Where a model's files go: the directory, and for a second model of this process a numbered folder in it. All
    ranks together, whether they have a directory or not.
    """
    mine = 0 if directory is None else _number(Path(directory), model)
    number = groups.from_rank_0(mine) or mine
    if directory is None:
        return None
    if model is not None:
        _MODELS[Path(directory).absolute()][model] = number
        _NUMBERS[Path(directory).absolute()].add(number)
    return Path(directory, *[str(number)] * (number > 1))


def _number(place: Path, model: torch.nn.Module | None) -> int:
    models = _MODELS.setdefault(place.absolute(), weakref.WeakKeyDictionary())
    if model is None:
        return 1
    if model not in models:
        had = _NUMBERS.setdefault(place.absolute(), set())
        models[model] = next(number for number in count(1) if number not in had)
        had.add(models[model])
    return models[model]


class Artifacts:
    """Writes into a directory on rank 0; without a directory it writes nothing.

    A file that cannot be written is a warning, once: nothing that is for people may stop a training.

    Args:
        source: a file that the user gave, and which is left as it is.
    """

    def __init__(
        self, directory: Path | None, groups: Groups, model: weakref.ref[torch.nn.Module], source: Path | None = None
    ) -> None:
        self._directory, self._groups, self._model, self._source = directory, groups, model, source
        self._has_warned = False
        self._strategy: Strategy | None = None
        self._write(".", Path.stat)  # what cannot work is said at the start

    def job(self, job: Job) -> None:
        """``job.json`` here, and wherever ``espresso profile`` asked for it; another model's beside it, numbered."""
        self._write("job.json", job.save)
        asked = os.environ.get(_JOB_PATH)
        if asked and self._groups.speaks:
            path, number = Path(asked), _number(Path(asked), self._model())
            if number > 1:
                path = path.with_name(f"{path.stem}-{number}{path.suffix}")
                logger.warning("another model's job is written to %s", path)
            job.save(path)

    def strategy(self, strategy: Strategy) -> None:
        """``strategy.json``: what is in use since it was decided."""
        if strategy is not self._strategy:
            self._strategy = strategy
            self._write("strategy.json", strategy.save)

    def history(self, rows: Sequence[dict[str, Any]]) -> None:
        """``history.json``: what was decided when, as a trace that Perfetto opens."""
        self._write("history.json", lambda path: write_history(path, rows))

    def _write(self, name: str, save: Callable[[Path], object]) -> None:
        if self._directory is None or not self._groups.speaks:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / name
            if self._source is None or path.resolve() != self._source.resolve():
                save(path)
        except OSError as error:
            if not self._has_warned:
                logger.warning("artifacts_dir cannot be written to (%s); training goes on without", error)
            self._has_warned = True


def tell_profile(**told: Any) -> None:
    """Tell ``espresso profile`` on this node that the script is registered: fields of that command's ``Marker``."""
    asked = os.environ.get(_JOB_PATH)
    if asked:
        with suppress(OSError):
            fields.save(asked + ".registered", told)  # whole: ranks of two nodes may share the place
