"""The function that DDP calls: ``ddp_model.register_comm_hook(state, espresso_hook)``.

DDP reads the annotations of the hook, so this module must not postpone their evaluation.
"""

from typing import Protocol

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]


class HookState(Protocol):
    """What the hook needs of a state."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]: ...


def espresso_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over all ranks as the state's strategy says.

    Args:
        state: an ``EspressoState``.
        bucket: from DDP; its buffer is changed in place.

    Returns:
        A future of the averaged buffer. It fails with the original error, worded, if the exchange fails.

    Example:
        >>> state = EspressoState(compressor="efsignsgd")          # doctest: +SKIP
        >>> ddp_model.register_comm_hook(state, espresso_hook)     # doctest: +SKIP
    """
    return state.reduce(bucket)
