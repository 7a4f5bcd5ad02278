"""Adam with compressed momentum, in the manner of 1-bit Adam.

Tang et al.: 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, ICML 2021. Adam is
not linear in the gradient, so error feedback on gradients does not carry over to it; momentum is linear. After a
warm-up of plain Adam the second moment v is frozen, and what is exchanged is each rank's momentum::

    worker i   m_i = β1 m + (1-β1) g_i      compressed with error feedback, in place of g_i
    servers    m   = mean of the m_i        compressed again, with error feedback
    all        x  <- x - η m̂ / (√v̂ + ε)

Momenta take the gradients' way through DDP's buckets, so they overlap with backward and use the same codecs, residuals
and transports.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import ParamsT, StateDict

from espresso.comm import EspressoError
from espresso.optim.base import AdaptiveOptimizer, Group, Row
from espresso.optim.exchange import BYTEPS_RAW_BELOW_BYTES, StrategyLike, attach, parameters_of
from espresso.state import AUTO, EspressoState
from espresso.strategies import CompressorSpec, Strategy

logger = logging.getLogger("espresso")

_VARIANCE_STEPS = "variance_steps"
"""How many gradients a parameter's second moment has seen."""


class CompressedAdam(AdaptiveOptimizer):
    """Adam for ``warmup_steps`` over plain allreduce, then frozen variance and two-way compressed momentum.

    The warm-up is ``torch.optim.AdamW`` bit for bit. Deviations from the paper: bias correction stays on, and an
    element whose variance is zero when the warm-up ends (its gradient was always zero) is not moved afterwards, where
    the division by ε would throw it far off.

    From the end of the warm-up ``param.grad`` holds the averaged *momentum* between backward and step: clipping then
    clips momentum. Accumulate gradients under ``no_sync()``: one exchange per step. The optimizer's ``state_dict``
    is equal on all ranks; residuals are in ``exchange.state_dict()``, per rank.

    Args:
        ddp_model: no communication hook is registered on it yet (unless ``exchange`` is given).
        params: parameters, named parameters or groups; None takes all that DDP averages.
        lr, betas, eps: as in Adam.
        weight_decay: decoupled, as in AdamW.
        warmup_steps: of plain Adam. The paper: until the variance is stable, about 15-20 % of all steps and at least
            1 / (1 - β2).
        maximize: climb instead of descend.
        compressor, raw_below_bytes, exchange, **settings: see :class:`espresso.optim.CLAN`.
        strategy: of the compressed steps, instead of the two-way one; not ``"auto"``.

    Raises:
        ValueError: a setting out of range. What :func:`espresso.register` raises.
    """

    exchange: EspressoState

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        params: ParamsT | None = None,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        maximize: bool = False,
        compressor: str | CompressorSpec = "efsignsgd",
        strategy: StrategyLike | None = None,
        raw_below_bytes: int = BYTEPS_RAW_BELOW_BYTES,
        exchange: EspressoState | None = None,
        **settings: Any,
    ) -> None:
        if warmup_steps < 1:
            raise ValueError(
                f"warmup_steps must be at least 1, got {warmup_steps!r}: the variance comes from it"
            )
        if strategy == AUTO:
            raise ValueError(
                "automatic mode measures gradients over all steps; give CompressedAdam a strategy"
            )
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize
        }  # fmt: skip
        super().__init__(parameters_of(ddp_model) if params is None else params, defaults)
        self.warmup_steps = warmup_steps
        self.exchange = attach(ddp_model, compressor, strategy, raw_below_bytes, exchange, settings)
        if not self.exchange.decided:
            raise ValueError("the given exchange is in automatic mode; register it with a strategy")
        assert self.exchange.strategy is not None
        self._compressed: Strategy = self.exchange.strategy
        self._num_steps = 0
        self._has_exchanged = False
        self._groups: dict[int, Group] = {}
        self.exchange.before_exchange.append(self._to_momentum)
        self._enter_phase()

    @property
    def is_compressing(self) -> bool:
        """Whether the warm-up is over."""
        return self._num_steps >= self.warmup_steps

    # -- the two phases --------------------------------------------------------------------------------

    def _enter_phase(self) -> None:
        """Exchange as the phase wants it, from the next iteration on."""
        if self.is_compressing:
            self.exchange.use(self._compressed)
        else:
            plain = Strategy.uniform(self._compressed.tensors, self._compressed.cluster, partition_bytes=0)
            self.exchange.use(plain)

    def _after_step(self) -> None:
        self._has_exchanged = False
        self._num_steps += 1
        if self._num_steps == self.warmup_steps:
            self._enter_phase()
            still = sum(not self.state[p] for group in self.param_groups for p in group["params"])
            if still:
                logger.warning(
                    "%d parameters had no gradient in %d steps of warm-up; without a variance they stay as they are",
                    still, self.warmup_steps,
                )  # fmt: skip

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any optimizer. A step that was skipped is forgotten."""
        self._has_exchanged = False
        super().zero_grad(set_to_none)

    def _to_momentum(self, bucket: GradBucket, grad_scale: float) -> None:
        """Make the bucket's gradients this rank's momenta, in the loss scale of the gradients."""
        if not self.is_compressing:
            return
        if bucket.index() == 0:
            if self._has_exchanged:
                raise EspressoError(
                    "CompressedAdam: a second backward pass was exchanged before optimizer.step(), and would be"
                    " added to momentum; accumulate gradients under ddp_model.no_sync(), or call"
                    " optimizer.zero_grad() if the step was skipped"
                )
            self._has_exchanged = True
            self._groups = {id(p): group for group in self.param_groups for p in group["params"]}
        buffer, offset = bucket.buffer(), 0
        for param in bucket.parameters():
            group = self._groups.get(id(param))
            if group is not None:
                beta1 = float(group["betas"][0])
                view = _view(buffer, offset, param)
                view.mul_((beta1 - 1.0) if group["maximize"] else (1.0 - beta1))
                if self.state[param]:
                    view.add_(self.state[param]["exp_avg"], alpha=beta1 * grad_scale)
            offset += param.numel()

    # -- the step --------------------------------------------------------------------------------------

    def _step_group(self, group: Group, rows: list[Row]) -> None:
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        kinds: dict[Any, list[Row]] = {}
        for row in rows:
            if row.param.numel():
                kinds.setdefault((row.param.device, row.param.dtype), []).append(row)
        for alike in kinds.values():
            work = alike[0].exp_avg.dtype
            params = [row.param.to(work) for row in alike]  # itself, but for halves
            grads = [row.grad.to(work) for row in alike]
            if self.is_compressing:
                torch._foreach_copy_([row.exp_avg for row in alike], grads)
            else:
                if group["maximize"]:
                    grads = list(torch._foreach_neg(grads))
                self._average(alike, grads, beta1, beta2)
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1.0 - lr * float(group["weight_decay"]))
            den = self._denominators(alike, beta2, float(group["eps"]))
            rates = [-lr / (1.0 - beta1**row.step) for row in alike]
            torch._foreach_addcdiv_(params, [row.exp_avg for row in alike], den, rates)
            for row, updated in zip(alike, params, strict=True):
                if updated is not row.param:
                    row.param.copy_(updated)

    def _average(self, rows: list[Row], grads: list[Tensor], beta1: float, beta2: float) -> None:
        second = [row.exp_avg_sq for row in rows]
        torch._foreach_lerp_([row.exp_avg for row in rows], grads, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1.0 - beta2)
        for row in rows:
            state = self.state[row.param]
            state[_VARIANCE_STEPS] = state.get(_VARIANCE_STEPS, 0) + 1

    def _denominators(self, rows: list[Row], beta2: float, eps: float) -> list[Tensor]:
        seen = [self.state[row.param].get(_VARIANCE_STEPS, 0) for row in rows]
        # A parameter that never had a variance has zeros there, which the mask below takes out.
        corrections = [(1.0 - beta2 ** max(steps, 1)) ** 0.5 for steps in seen]
        den = list(torch._foreach_sqrt([row.exp_avg_sq for row in rows]))
        torch._foreach_div_(den, corrections)
        torch._foreach_add_(den, eps)
        if self.is_compressing:
            for row, denominator in zip(rows, den, strict=True):
                denominator.masked_fill_(row.exp_avg_sq == 0, float("inf"))
        return den

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As of any optimizer; the phase follows from the steps taken. All ranks together, between two steps."""
        super().load_state_dict(state_dict)
        self._num_steps = max((int(state["step"]) for state in self.state.values()), default=0)
        self._has_exchanged = False
        self._enter_phase()


def _view(buffer: Tensor, offset: int, param: Tensor) -> Tensor:
    """The parameter's place in a bucket, laid out as DDP does: in the parameter's own strides if it has no holes."""
    if _is_dense(param):
        return buffer.as_strided(param.shape, param.stride(), buffer.storage_offset() + offset)
    return buffer[offset : offset + param.numel()].view(param.shape)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
