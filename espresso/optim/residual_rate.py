"""Error feedback in units of the parameter's change: residuals follow the learning rate.

A residual e is what a step at rate η' did not send. Sent at rate η it should still move the parameter by η'·e, so it
is multiplied by η'/η first (Zheng, Huang, Kwok: Communication-Efficient Distributed Blockwise Momentum SGD with
Error-Feedback, NeurIPS 2019; the shipped variant of BytePS-Compress). For an optimizer that is linear in the
gradient this makes Σ η_t sent_t + η_T e_T = Σ η_t g_t. CLAN goes without: LANS normalises gradients.
"""

from __future__ import annotations

import math

from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim.optimizer import Optimizer

from espresso.live.state import EspressoState

KEY = "residual_lr"
"""Entry of a parameter group: the rate in whose units its residuals are. It travels with the optimizer's state."""


def scale_residuals(exchange: EspressoState, optimizer: Optimizer) -> None:
    """From now on, multiply residuals by η_{t-1}/η_t before step t's gradients are compressed. All ranks alike.

    Every group follows its own rate. A rate of zero leaves residuals as they are, and the next one above zero is
    compared with the last one above zero. For any optimizer whose rate is ``lr`` in its groups.

    Example:
        >>> scale_residuals(espresso.register(ddp), torch.optim.SGD(ddp.parameters(), 0.1))   # doctest: +SKIP
    """

    def prepare(bucket: GradBucket, _: float) -> None:
        if bucket.index() == 0:
            _follow(exchange, optimizer)

    exchange.before_exchange.append(prepare)


def _follow(exchange: EspressoState, optimizer: Optimizer) -> None:
    factors: dict[str, float] = {}
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        factor = ratio(group.get(KEY, 0.0), rate)
        if rate > 0.0:
            group[KEY] = rate
        if factor != 1.0:
            names = map(exchange.name_of, group["params"])
            factors.update({name: factor for name in names if name is not None})
    if factors:
        exchange.rescale_residuals(factors)


def ratio(before: float, now: float) -> float:
    """What residuals are multiplied by: before/now; 1 where either is zero or the ratio leaves float32."""
    if before <= 0.0 or now <= 0.0:
        return 1.0
    found = before / now
    return found if math.isfinite(found) and found < 1e30 else 1.0
