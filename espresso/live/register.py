"""``register``: the one line that makes a DDP model exchange its gradients through espresso."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Unpack

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from espresso.comm.ddp_buckets import BucketLayout
from espresso.comm.environment import read_environment, told_world_size
from espresso.comm.errors import EspressoError, TopologyError, UnsupportedModelError
from espresso.comm.hook import espresso_hook
from espresso.comm.meeting import stay_away
from espresso.live.artifacts import tell_profile
from espresso.live.config import Settings
from espresso.live.given import AUTO, CompressorLike, StrategyLike
from espresso.live.names import BoundModel
from espresso.live.script import Scaler
from espresso.live.state import EspressoState, why_off

logger = logging.getLogger("espresso")


def register(
    ddp_model: torch.nn.Module,
    compressor: CompressorLike = AUTO,
    strategy: StrategyLike = AUTO,
    process_group: dist.ProcessGroup | None = None,
    grad_scaler: Scaler | None = None,
    **config: Unpack[Settings],
) -> EspressoState:
    """Make a DDP model exchange its gradients through espresso. The one line. All ranks together.

    Args: as for :class:`EspressoState`; ``process_group`` defaults to the one DDP was given.

    In one process a model without DDP is fine too, and with ``ESPRESSO_DISABLE=1`` any model is: the script runs as it
    is, the state is off.

    Returns:
        The state, already registered as DDP's communication hook.

    Raises:
        TypeError: not a DDP model, or an unknown setting.
        UnsupportedModelError, StrategyError, DisagreementError, TopologyError: see there.

    Example:
        >>> state = espresso.register(ddp_model, compressor="dgc:ratio=0.01")   # doctest: +SKIP
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        why = why_off() or ("one process without DDP" if _is_alone() else "")
        if why:
            tell_profile(why_not=f"espresso is off ({why})" if why_off() else why)
            if not why_off():
                _warn_of_others()
            state = EspressoState(compressor, strategy, None, grad_scaler, **config)
            with suppress(EspressoError, ValueError, TypeError):  # so that a checkpoint says of which model it is
                state.bind(BoundModel.of(ddp_model))
            return state.turn_off(why)
        is_sharded = any(each.__name__ == "FSDPModule" for each in type(ddp_model).__mro__)
        remedy = "use espresso.fsdp.register" if is_sharded else "wrap the model in DistributedDataParallel first"
        if isinstance(getattr(ddp_model, "_orig_mod", None), DistributedDataParallel):
            remedy = "register the DistributedDataParallel model before it is compiled"
        raise TypeError(
            f"espresso.register needs a DistributedDataParallel model, got {type(ddp_model).__name__}; {remedy}"
        )
    hooks = getattr(ddp_model, "_comm_hooks", ())
    if hooks and not why_off():
        raise UnsupportedModelError(
            f"this model has a communication hook already ({hooks[0][0].__name__}), and DDP takes one for its life:"
            " register once, or wrap the model in DistributedDataParallel anew"
        )
    group = ddp_model.process_group if process_group is None else process_group
    state = EspressoState(compressor, strategy, group, grad_scaler, **config)
    if state.is_off:
        with suppress(EspressoError, ValueError, TypeError):
            state.bind(ddp_model)
        stay_away(group)
        tell_profile(why_not=f"espresso is off ({why_off()})")
        return state
    state.bind(ddp_model).start()
    try:
        ddp_model.register_comm_hook(state, espresso_hook)
    except BaseException:
        state.close()
        raise
    state.session.lay_buckets = BucketLayout(ddp_model, state, espresso_hook)
    state.session.lay_buckets_as_asked()
    return state


def _is_alone() -> bool:
    """Whether nobody else trains with this process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() == 1
    return told_world_size() == 1


def _warn_of_others() -> None:
    """Say so where the launcher has started others, which then train models of their own."""
    with suppress(TopologyError):  # variables that are left over from elsewhere
        launch = read_environment()
        if launch is not None and launch.world_size > 1:
            logger.warning(
                "espresso is off: this model is not in DistributedDataParallel, and no process group has other ranks;"
                " %s says that this is rank %d of %d, which train apart now",
                launch.launcher,
                launch.rank,
                launch.world_size,
            )
