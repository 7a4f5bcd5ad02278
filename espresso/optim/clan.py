"""CLAN: LANS on gradients that were exchanged compressed in both directions.

Zhong, Xie, Zheng, Lin: Compressed Communication for Distributed Training: Adaptive Methods and System, 2021.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import ParamsT

from espresso.live.given import StrategyLike
from espresso.live.state import EspressoState
from espresso.optim.exchange import RAW_BELOW_BYTES, ExchangeSettings, WithExchange, attach, parameters_of
from espresso.optim.exchange import scale_residuals as follow_rate
from espresso.optim.lans import LANS
from espresso.strategies import CompressorSpec


class CLAN(WithExchange, LANS):
    """LANS with its exchange: registers the two-way compressed exchange on the DDP model and steps by LANS.

    Biased compressors run with error feedback on both sides, unbiased ones without. With ``compressor="none"`` it is
    LANS over plain DDP. All ranks make it together.

    The optimizer's ``state_dict`` is LANS's and equal on all ranks; residuals are in ``exchange.state_dict()``, per
    rank.

    Args:
        ddp_model: no communication hook is registered on it yet (unless ``exchange`` is given).
        params: parameters, named parameters or groups; None takes all that DDP averages.
        lr, betas, eps, weight_decay, bias_correction, maximize, foreach, fused: see :class:`LANS`.
        compressor: spec of the compressor, ``name`` or ``name:key=value,…``.
        strategy: another exchange than the two-way one: ``"auto"``, a file, a strategy or a function that makes one.
        raw_below_bytes: smaller tensors are not compressed.
        scale_residuals: multiply residuals by the ratio of learning rates; see :func:`espresso.optim.scale_residuals`.
        exchange: a state that :func:`espresso.register` returned for this model: compressor and raw_below_bytes are of
            no account then, and strategy or settings are an error.
        **settings: as for :func:`espresso.register` (``timeout_s``, ``grad_scaler``, ``ranks_per_node``, …).

    Raises:
        What :class:`LANS` and :func:`espresso.register` raise.

    Example:
        >>> optimizer = CLAN(ddp_model, lr=0.01, compressor="efsignsgd")   # doctest: +SKIP
        >>> loss(ddp_model(batch)).backward(); optimizer.step()            # doctest: +SKIP
    """

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        params: ParamsT | None = None,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        compressor: str | CompressorSpec = "efsignsgd",
        strategy: StrategyLike | None = None,
        raw_below_bytes: int = RAW_BELOW_BYTES,
        scale_residuals: bool = False,
        exchange: EspressoState | None = None,
        **settings: Unpack[ExchangeSettings],
    ) -> None:
        # LANS first: what it refuses must not leave a hook behind.
        super().__init__(
            parameters_of(ddp_model) if params is None else params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        self.exchange = attach(ddp_model, compressor, strategy, raw_below_bytes, exchange, settings)
        if scale_residuals:
            follow_rate(self.exchange, self)
