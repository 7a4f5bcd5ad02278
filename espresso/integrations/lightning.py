"""Lightning: a callback for any trainer with a DDP strategy, or a strategy. One of them is enough::

    Trainer(strategy="ddp", callbacks=[EspressoCallback(compressor="efsignsgd")])
    Trainer(strategy=EspressoStrategy(compressor="efsignsgd"))

Both register the model that Lightning wraps, say which epoch begins, write metrics to the trainer's loggers, and put
all ranks' residuals into Lightning's checkpoints, which any number of ranks can go on from. In one process the trainer
runs as it is. They are for the package ``lightning``; ``pytorch_lightning`` has a trainer of its own.

``DDPStrategy(ddp_comm_state=…, ddp_comm_hook=…)`` is not enough: Lightning ignores it on the CPU without a word, and on
a GPU does not tell the state which model it serves.
"""

from __future__ import annotations

from typing import Any, Unpack, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from espresso.live.config import RANGES, Settings
from espresso.live.given import AUTO, CompressorLike, StrategyLike
from espresso.live.register import register
from espresso.live.state import EspressoState

ENTRY = "espresso"
"""Of a checkpoint."""


class _Exchange:
    """What both adapters do: register, save, load, log."""

    def __init__(self, compressor: CompressorLike, strategy: StrategyLike, settings: Settings) -> None:
        self._given = (compressor, strategy, settings)
        self._loaded: dict[str, Any] | None = None
        self._logged: int | None = None
        self._epoch: int | None = None
        self.state: EspressoState | None = None

    def register(self, model: torch.nn.Module | None, scaler: Any) -> None:
        assert model is not None
        if self.state is not None:  # of an earlier fit; checkpoints may be saved after its end
            self.state.close()
        compressor, strategy, settings = self._given
        self.state, self._epoch = register(model, compressor, strategy, None, scaler, **settings), None
        loaded, self._loaded = self._loaded, None  # a later fit does not begin from it again
        if loaded is not None:
            self.state.load_state_dict(loaded)

    def load(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint once the model is registered: Lightning reads it before it wraps the model."""
        if trainer.state.fn == TrainerFn.FITTING:  # validating and testing read checkpoints too
            self._loaded = checkpoint.get(ENTRY)

    def save(self, checkpoint: dict[str, Any]) -> None:
        if self.state is not None:
            checkpoint[ENTRY] = self.state.gather_state_dict()

    def log(self, trainer: Trainer, step: int) -> None:
        every = getattr(trainer, "log_every_n_steps", 1)
        # None was taken yet, or the batch only accumulates.
        if self.state is None or not step or not every or step % every or step == self._logged:
            return
        self._logged = step
        for logger in trainer.loggers:
            logger.log_metrics(self.state.metrics(), step=step)

    def begin_epoch(self, trainer: Trainer) -> None:
        if self.state is not None and self._epoch != trainer.current_epoch:
            self._epoch = trainer.current_epoch
            self.state.set_epoch(self._epoch)


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


class EspressoCallback(Callback):
    """Registers the trainer's DDP model when training starts.

    Args: as for :func:`espresso.register`; a precision plugin's ``GradScaler`` is found.

    Attributes:
        state: the :class:`~espresso.EspressoState`; None before training starts.

    Example:
        >>> trainer = Trainer(strategy="ddp", callbacks=[EspressoCallback("dgc:ratio=0.01")])   # doctest: +SKIP
    """

    def __init__(
        self, compressor: CompressorLike = AUTO, strategy: StrategyLike = AUTO, **settings: Unpack[Settings]
    ) -> None:
        self._exchange = _Exchange(compressor, strategy, settings)

    @property
    def state(self) -> EspressoState | None:
        return self._exchange.state

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._exchange.register(trainer.strategy.model, _scaler(trainer))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._exchange.begin_epoch(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._exchange.log(trainer, trainer.global_step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._exchange.save(checkpoint)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._exchange.load(trainer, checkpoint)


class EspressoStrategy(DDPStrategy):
    """DDP whose gradients are exchanged through espresso.

    Args:
        compressor, strategy: as for :func:`espresso.register`.
        **keywords: its settings; what is none of them goes to Lightning's ``DDPStrategy``.

    Attributes:
        espresso: the :class:`~espresso.EspressoState`; None before training starts.

    Example:
        >>> trainer = Trainer(devices=2, strategy=EspressoStrategy("dgc:ratio=0.01"))   # doctest: +SKIP
    """

    def __init__(self, compressor: CompressorLike = AUTO, strategy: StrategyLike = AUTO, **keywords: Any) -> None:
        super().__init__(**{name: value for name, value in keywords.items() if name not in RANGES})
        ours = cast(Settings, {name: value for name, value in keywords.items() if name in RANGES})
        self._exchange = _Exchange(compressor, strategy, ours)

    @property
    def espresso(self) -> EspressoState | None:
        return self._exchange.state

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._exchange.register(self.model, getattr(self.precision_plugin, "scaler", None))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.lightning_module is not None:  # a strategy is not told of epochs
            self._exchange.begin_epoch(self.lightning_module.trainer)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        done = super().optimizer_step(*args, **kwargs)
        if self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            self._exchange.log(trainer, trainer.global_step + 1)  # it is counted after this
        return done

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if "optimizer_states" in checkpoint:  # not where only weights are asked for
            self._exchange.save(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        if self.lightning_module is not None:
            self._exchange.load(self.lightning_module.trainer, checkpoint)
        return checkpoint
