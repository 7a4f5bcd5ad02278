"""Adam with compressed momentum, in the manner of 1-bit Adam.

Tang et al.: 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, ICML 2021. Adam is
not linear in the gradient, so error feedback on gradients does not carry over to it; momentum is linear. After a
warm-up of plain Adam the second moment v is frozen, and what is exchanged is each rank's momentum::

    worker i   m_i = β1 m + (1-β1) g_i      compressed with error feedback, in place of g_i
    servers    m   = mean of the m_i        compressed again, with error feedback
    all        x  <- x - η m̂ / (√v̂ + ε)

Since v̂ is frozen and equal everywhere, the division may come first: with ``precondition`` the ranks exchange
u_i = m_i / (√v̂ + ε), and the compressor's error is spread over elements as the step itself is. The paper's form divides
that error by √v̂ afterwards, which throws elements of small variance far off where variances differ much.

Momenta take the gradients' way through DDP's buckets, so they overlap with backward and use the same codecs, residuals
and transports.
"""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import ParamsT, StateDict

from espresso.comm.errors import EspressoError
from espresso.live.config import Range
from espresso.live.fixed_planner import FixedPlanner
from espresso.live.given import AUTO, StrategyLike
from espresso.live.state import EspressoState
from espresso.optim.base import AdaptiveOptimizer, Group, Row, by_kind
from espresso.optim.exchange import (
    RAW_BELOW_BYTES,
    ExchangeSettings,
    WithExchange,
    attach,
    bucket_view,
    parameters_of,
)
from espresso.strategies import CompressorSpec, Strategy

logger = logging.getLogger("espresso")

_VARIANCE_STEPS = "variance_steps"
"""How many gradients a parameter's second moment has seen."""

_WARMUP_STEPS = Range("a whole number of at least 1, since the variance comes from it", (int,), lambda num: num >= 1)

_STEPS, _PHASE = "steps", "phase"
"""In every group, and so in checkpoints: the steps taken, and what first moments are."""


class Phase(StrEnum):
    """What the first moments are."""

    WARM_UP = "warm-up"
    DIVIDED = "compressed, divided"
    UNDIVIDED = "compressed, not divided"


class CompressedAdam(WithExchange, AdaptiveOptimizer):
    """Adam for ``warmup_steps`` over plain allreduce, then frozen variance and two-way compressed momentum.

    The warm-up is ``torch.optim.AdamW`` bit for bit. Deviations from the paper: bias correction stays on, momentum is
    divided before it is compressed (see the module), and small frozen variances have a floor.

    From the end of the warm-up ``param.grad`` holds the averaged momentum, divided, between backward and step:
    clipping then clips that. Accumulate gradients under ``no_sync()``: one exchange per step. The optimizer's
    ``state_dict`` is equal on all ranks; residuals are in ``exchange.state_dict()``, per rank. Where espresso is off
    (``ESPRESSO_DISABLE=1``) the steps are the same, with momenta that nobody compressed.

    Args:
        ddp_model: no communication hook is registered on it yet (unless ``exchange`` is given).
        params: parameters, named parameters or groups; None takes all that DDP averages.
        lr, betas, eps: as in Adam.
        weight_decay: decoupled, as in AdamW.
        warmup_steps: of plain Adam. The paper: until the variance is stable, about 15-20 % of all steps.
        deviation_floor: elements whose √v̂ is below this share of their tensor's root mean square are divided by that
            instead: a gradient that was all but absent in the warm-up says nothing of its size later. 0 switches it
            off; elements without any variance then stay where they are.
        precondition: exchange momentum divided by √v̂ + ε; False exchanges momentum itself, as the paper does.
        maximize: climb instead of descend.
        compressor, raw_below_bytes, exchange, settings: see :class:`espresso.optim.CLAN`.
        strategy: of the compressed steps, instead of the two-way one; not ``"auto"``.

    Raises:
        TypeError, ValueError: a setting of another type, or out of range. What :func:`espresso.register` raises.
    """

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
        deviation_floor: float = 0.1,
        precondition: bool = True,
        maximize: bool = False,
        compressor: str | CompressorSpec = "efsignsgd",
        strategy: StrategyLike | None = None,
        raw_below_bytes: int = RAW_BELOW_BYTES,
        exchange: EspressoState | None = None,
        **settings: Any,
    ) -> None:
        _WARMUP_STEPS.check("warmup_steps", warmup_steps)
        if not 0.0 <= deviation_floor <= 1.0:
            raise ValueError(f"deviation_floor must be from 0 to 1, got {deviation_floor!r}")
        if strategy == AUTO:
            raise ValueError("automatic mode measures gradients over all steps; give CompressedAdam a strategy")
        if exchange is not None and any(_of_adam(prepare) for prepare in exchange.before_exchange):
            raise ValueError(
                "the given exchange has a CompressedAdam already, which says what is exchanged; give one of them all"
                " parameters, in groups, or wrap the model in DistributedDataParallel anew and register that"
            )
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize
        }  # fmt: skip
        super().__init__(parameters_of(ddp_model) if params is None else params, defaults)
        self.warmup_steps = warmup_steps
        self.precondition = precondition
        self.deviation_floor = deviation_floor
        self.exchange = attach(
            ddp_model, compressor, strategy, raw_below_bytes, exchange, cast(ExchangeSettings, settings)
        )
        # Where the job is only measured (``espresso profile``) a strategy that was given is not in use.
        if not self.exchange.decided and self.exchange.session.given.strategy is None:
            raise ValueError("the given exchange is in automatic mode; register it with a strategy")
        self._compressed = self._strategy_of_exchange()
        self._num_steps, self._phase = 0, Phase.WARM_UP
        self._has_exchanged = False
        self._groups: dict[int, Group] = {}
        self._inverses: dict[Tensor, Tensor] = {}
        self.exchange.before_exchange.append(self._to_momentum)
        self._enter_phase()

    @property
    def is_compressing(self) -> bool:
        """Whether the warm-up is over."""
        return self._phase is not Phase.WARM_UP

    def _strategy_of_exchange(self) -> Strategy | None:
        """As it was given, and not as it is in this step: compressors may change later. None where espresso is off."""
        if self.exchange.is_off:
            return None
        decider = self.exchange.session.decider
        return decider.given if isinstance(decider, FixedPlanner) else decider.strategy

    # -- the two phases --------------------------------------------------------------------------------

    def _enter_phase(self) -> None:
        """Exchange as the phase wants it, from the next iteration on; divide momenta at the end of the warm-up."""
        self._inverses.clear()
        self._groups = {id(p): group for group in self.param_groups for p in group["params"]}
        if self._num_steps >= self.warmup_steps and not self.is_compressing:
            self._phase = Phase.DIVIDED if self.precondition else Phase.UNDIVIDED
            self._freeze()
        if self._compressed is None:  # espresso is off
            return
        if self.is_compressing:
            self.exchange.use(self._compressed)
            return
        plain = Strategy.uniform(self._compressed.tensors, self._compressed.cluster, partition_bytes=0)
        self.exchange.use(plain)

    def _freeze(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        if self.precondition:
            for param in params:
                if self.state[param]:
                    self.state[param]["exp_avg"].mul_(self._inverse(param))
        idle = sum(not self.state[param] for param in params)
        if idle:
            logger.warning(
                "%d parameters had no gradient in %d steps of warm-up; without a variance they stay as they are",
                idle, self.warmup_steps,
            )  # fmt: skip

    def state_dict(self) -> StateDict:
        """As of any optimizer, with the phase."""
        for group in self.param_groups:
            group[_STEPS], group[_PHASE] = self._num_steps, self._phase.value
        return super().state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer. Parameters that come after the warm-up have no variance and stay as they are."""
        super().add_param_group(param_group)
        if hasattr(self, "_groups"):
            self._groups.update({id(p): param_group for p in param_group["params"]})

    def _after_step(self) -> None:
        self._has_exchanged = False
        self._num_steps += 1
        if self._num_steps == self.warmup_steps:
            self._enter_phase()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any optimizer. A step that was skipped is forgotten.

        After the warm-up gradients are always set to None: where no rank used a parameter DDP leaves what is there, and
        zeros would be its new momentum.
        """
        self._has_exchanged = False
        super().zero_grad(set_to_none or self.is_compressing)

    def _inverse(self, param: Tensor) -> Tensor:
        """1 / (√v̂ + ε) of the frozen variance with its floor, and 0 where that is 0. Worked out once."""
        found = self._inverses.get(param)
        if found is None:
            group, state = self._groups[id(param)], self.state[param]
            correction = 1.0 - float(group["betas"][1]) ** state.get(_VARIANCE_STEPS, 1)
            variance = state["exp_avg_sq"]
            deviation = (variance / correction).sqrt_()
            if param.numel():
                # In double precision: how a mean is added up depends on threads, and replicas have to agree.
                size = float(deviation.double().square().mean().sqrt())
                deviation.clamp_(min=self.deviation_floor * size)
            still = deviation == 0
            found = deviation.add_(float(group["eps"])).reciprocal_().masked_fill_(still, 0.0)
            self._inverses[param] = found
        return found

    # -- the hook --------------------------------------------------------------------------------------

    def _to_momentum(self, bucket: GradBucket, grad_scale: float, is_first: bool) -> None:
        """Make the bucket's gradients this rank's momenta, in the loss scale of the gradients."""
        if is_first and self.exchange.is_joining:
            raise EspressoError(
                "CompressedAdam: the model is in join(), but ranks whose inputs have ended take no steps, and all ranks"
                " change together what is exchanged; give every rank as many batches"
            )
        if not self.is_compressing:
            return
        if is_first:
            self._check_alone()
        self.exchange.counts(bucket)
        offset = 0
        for param in bucket.parameters():
            if id(param) in self._groups:
                view = bucket_view(bucket.buffer(), offset, param)
                self._blend(param, view, grad_scale)
            offset += param.numel()

    def _blend(self, param: Tensor, gradient: Tensor, grad_scale: float) -> None:
        group, state = self._groups[id(param)], self.state[param]
        beta1 = float(group["betas"][0])
        if not state:
            gradient.zero_()
            return
        gradient.mul_((beta1 - 1.0) if group["maximize"] else (1.0 - beta1))
        if self.precondition:
            gradient.mul_(self._inverse(param))
        gradient.add_(state["exp_avg"], alpha=beta1 * grad_scale)

    def _check_alone(self) -> None:
        if self._has_exchanged:
            raise EspressoError(
                "CompressedAdam: a second backward pass was exchanged before optimizer.step(), and would be added to"
                " momentum; accumulate gradients under ddp_model.no_sync(), or call optimizer.zero_grad() if the"
                " step was skipped"
            )
        self._has_exchanged = True

    # -- the step --------------------------------------------------------------------------------------

    def _step_group(self, group: Group, rows: list[Row]) -> None:
        if self.is_compressing:
            rows = [row for row in rows if _VARIANCE_STEPS in self.state[row.param]]
        for alike in by_kind(rows):
            work = alike[0].exp_avg.dtype
            params = [row.param.to(work) for row in alike]  # itself, but for halves
            grads = [row.grad.to(work) for row in alike]
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1.0 - float(group["lr"]) * float(group["weight_decay"]))
            if self.is_compressing:
                self._move_compressed(group, alike, params, grads)
            else:
                self._move_plain(group, alike, params, grads)
            for row, updated in zip(alike, params, strict=True):
                if updated is not row.param:
                    row.param.copy_(updated)

    def _move_plain(self, group: Group, rows: list[Row], params: list[Tensor], grads: list[Tensor]) -> None:
        """Adam, in the operations of ``torch.optim.AdamW``."""
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        first, second = [row.exp_avg for row in rows], [row.exp_avg_sq for row in rows]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        torch._foreach_lerp_(first, grads, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1.0 - beta2)
        den = list(torch._foreach_sqrt(second))
        torch._foreach_div_(den, [(1.0 - beta2**row.step) ** 0.5 for row in rows])
        torch._foreach_add_(den, float(group["eps"]))
        torch._foreach_addcdiv_(params, first, den, [-lr / (1.0 - beta1**row.step) for row in rows])
        for row in rows:
            self.state[row.param][_VARIANCE_STEPS] = row.step

    def _move_compressed(self, group: Group, rows: list[Row], params: list[Tensor], averages: list[Tensor]) -> None:
        """What the exchange brought is the new momentum, divided already or not."""
        lr, beta1 = float(group["lr"]), float(group["betas"][0])
        for row, param, average in zip(rows, params, averages, strict=True):
            # The mean of momenta is the momentum of the mean; what DDP leaves alone has a gradient still.
            if self.exchange.is_off or self.exchange.name_of(row.param) is None:
                self._blend(row.param, average, 1.0)
            row.exp_avg.copy_(average)
            inverse = self._inverse(row.param)
            rate = -lr / (1.0 - beta1**row.step)
            if self.precondition:
                # An element without variance is not moved, whatever the compressor made of its zero.
                row.exp_avg.masked_fill_(inverse == 0, 0.0)
                param.add_(row.exp_avg, alpha=rate)
            else:
                param.addcmul_(row.exp_avg, inverse, value=rate)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As of any optimizer, or a state of ``torch.optim.AdamW``. All ranks together, between two steps.

        Raises:
            ValueError: it is of after the warm-up, and has no moments, or ``warmup_steps`` or ``precondition`` say
                otherwise.
        """
        steps, phase = self._told(state_dict)
        if self.is_compressing:
            self._compressed = self._strategy_of_exchange()  # without what the guard has left exact meanwhile
        super().load_state_dict(state_dict)
        if phase is Phase.WARM_UP:
            for state in filter(None, self.state.values()):
                state[_VARIANCE_STEPS] = int(state["step"])
        self._num_steps, self._phase, self._has_exchanged = steps, phase, False
        self._enter_phase()

    def _told(self, state_dict: StateDict) -> tuple[int, Phase]:
        """The steps taken, and the phase, of a checkpoint that can be gone on from here."""
        group, states = state_dict["param_groups"][0], [state for state in state_dict["state"].values() if state]
        steps = group.get(_STEPS, max((int(state["step"]) for state in states), default=0))
        mine = Phase.DIVIDED if self.precondition else Phase.UNDIVIDED
        # Where no phase was saved: a frozen variance has seen fewer steps, or just as many as a warm-up has.
        seen = [(int(state["step"]), int(state[_VARIANCE_STEPS])) for state in states if _VARIANCE_STEPS in state]
        is_frozen = any(step > known for step, known in seen) or (bool(seen) and steps == self.warmup_steps)
        phase = Phase(group.get(_PHASE, mine if is_frozen else Phase.WARM_UP))
        if phase is not Phase.WARM_UP and not states:
            raise ValueError(
                f"the checkpoint is of step {steps}, after its warm-up, and has no moments, without which no parameter"
                " moves; torch.distributed.checkpoint reads only what the dictionary that it is given has: make that"
                " with get_state_dict of torch.distributed.checkpoint.state_dict, and load it with set_state_dict"
            )
        if phase is not Phase.WARM_UP and steps < self.warmup_steps:
            raise ValueError(
                f"the checkpoint is of step {steps}, after its warm-up; with warmup_steps={self.warmup_steps} it would"
                " be in it again: its variances are frozen, and cannot go on"
            )
        if phase not in (Phase.WARM_UP, mine):
            raise ValueError(
                f"the checkpoint's momenta are {phase.value}; precondition={self.precondition} needs them {mine.value}"
            )
        return steps, phase


def _of_adam(prepare: Any) -> bool:
    """Whether a function that is called before the exchange is a CompressedAdam's."""
    return isinstance(getattr(prepare, "__self__", None), CompressedAdam)
