"""Hugging Face's Trainer: ``Trainer(…, callbacks=[EspressoCallback(compressor="efsignsgd")])``.

The callback registers the model that the trainer wraps in DDP at its first forward pass, says which epoch begins, adds
metrics to what the trainer logs, saves residuals sharded beside each of the trainer's checkpoints, and goes on from
them on any number of ranks. In one process the trainer runs as it is.

A trainer calls what ``report_to`` names before the callbacks it was given, so that those miss the metrics. Give them
behind it: ``report_to="none"`` and ``callbacks=[EspressoCallback(…), TensorBoardCallback()]``.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Unpack

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from espresso.live.config import Settings
from espresso.live.given import AUTO, CompressorLike, StrategyLike
from espresso.live.register import register
from espresso.live.state import EspressoState

logger = logging.getLogger("espresso")

FOLDER = "espresso"
"""In the folder of a trainer's checkpoint."""


class EspressoCallback(TrainerCallback):
    """Registers the trainer's DDP model.

    Args:
        compressor, strategy: as for :func:`espresso.register`.
        **settings: its settings.
        resume_from: the checkpoint that training goes on from, where that is not in ``output_dir``.

    Attributes:
        state: the :class:`~espresso.EspressoState`; None before the first forward pass. It stays open when training
            ends: a second ``train()`` goes on with the same DDP model.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[EspressoCallback("dgc:ratio=0.01")])   # doctest: +SKIP
    """

    def __init__(
        self,
        compressor: CompressorLike = AUTO,
        strategy: StrategyLike = AUTO,
        resume_from: str | Path | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self._given = (compressor, strategy, settings)
        self._resume_from = resume_from
        self._look: Any = None
        self._model: torch.nn.Module | None = None
        self._epoch, self._in_epochs = 0, False
        self.state: EspressoState | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the wrapped model: a trainer does not show it to callbacks."""
        inner, scaler = kwargs["model"], getattr(kwargs.get("optimizer"), "scaler", None)  # Accelerate's, in half

        def look(module: torch.nn.Module, _: Any) -> None:
            if isinstance(module, DistributedDataParallel) and module.module is inner:
                self._look.remove()
                self._start(module, args, state, scaler)

        self._forget()
        self._epoch, self._in_epochs = int(state.epoch or 0), False
        if args.world_size == 1:
            self._start(inner, args, state, scaler)
        else:
            self._look = register_module_forward_pre_hook(look)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Counted here: of data without a length the trainer's own count is a part of max_steps.
        self._epoch, self._in_epochs = self._epoch + self._in_epochs, True
        if self.state is not None:
            self.state.set_epoch(self._epoch)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.state is not None and not self.state.is_off and not args.save_only_model:
            # All ranks; each saves what is its own.
            save({FOLDER: self.state}, checkpoint_id=self._folder(args, state))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.state is not None:
            figures = self.state.metrics()
            kwargs.get("logs", {}).update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.state is None and args.world_size > 1:
            logger.warning("espresso exchanged nothing: the trainer wrapped the model in no DistributedDataParallel")
        self._forget()

    def _start(self, model: torch.nn.Module, args: TrainingArguments, state: TrainerState, scaler: Any) -> None:
        if self.state is None or model is not self._model:
            if self.state is not None:
                self.state.close()
            compressor, strategy, settings = self._given
            self.state, self._model = register(model, compressor, strategy, None, scaler, **settings), model
        self._resume(args, state)
        self.state.set_epoch(self._epoch)

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        assert self.state is not None
        if not state.global_step or self.state.is_off:
            return
        folder = self._folder(args, state) if self._resume_from is None else Path(self._resume_from) / FOLDER
        session = self.state.session
        session.executor.conclude()  # what the planner asks of all ranks comes first, on all of them
        whole = folder / ".metadata"  # written last, by one rank: a save that was killed, or another host, lacks it
        found = session.groups.everywhere(whole.exists())  # they load together, or nobody does
        lacking = [str(rank) for rank, is_there in enumerate(found) if not is_there]
        if not lacking:
            load({FOLDER: self.state}, checkpoint_id=folder)
        elif session.groups.rank == 0:
            logger.warning(
                "training goes on at step %d without residuals: no %s on %s. Where the checkpoint is elsewhere, say so:"
                " EspressoCallback(resume_from=…)",
                state.global_step,
                whole,
                "any rank" if len(lacking) == len(found) else f"rank {', '.join(lacking)}",
            )

    @staticmethod
    def _folder(args: TrainingArguments, state: TrainerState) -> Path:
        return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / FOLDER

    def _forget(self) -> None:
        if self._look is not None:
            self._look.remove()
            self._look = None
