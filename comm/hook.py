"""DDP's front of a job: the function that DDP calls, and what its buckets hold.

``ddp_model.register_comm_hook(state, espresso_hook)``

DDP reads the annotations of the hook, so this module must not postpone their evaluation.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from espresso.comm.errors import EspressoError, UnsupportedModelError
from espresso.strategies import Bucket, Slot


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


class DdpBuckets:
    """Describes DDP's buckets, each once: DDP rebuilds them after the first step.

    Args:
        names: of the parameters that are averaged, by ``id``.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._known: dict[int, tuple[tuple[int, ...], Bucket]] = {}

    def describe(self, bucket: GradBucket) -> Bucket:
        """What a bucket holds.

        Raises:
            EspressoError, UnsupportedModelError: parameters of another model, a sparse or padded bucket.
        """
        index, parameters, buffer = bucket.index(), bucket.parameters(), bucket.buffer()
        dtype = str(buffer.dtype).removeprefix("torch.")
        ids = tuple(map(id, parameters))
        known = self._known.get(index)
        if known is not None and known[0] == ids and known[1].dtype == dtype:
            return known[1]
        slots, offset = [], 0
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is None:
                raise EspressoError(
                    f"bucket {index} holds a parameter of shape {tuple(parameter.shape)} that the bound model does"
                    " not have; bind the state to the model that DDP wraps"
                )
            slots.append(Slot(name, offset, parameter.numel()))
            offset += parameter.numel()
        if offset != buffer.numel():
            raise UnsupportedModelError(
                f"bucket {index} has {buffer.numel()} elements for parameters of {offset}: sparse or padded buckets"
                " are not supported"
            )
        described = Bucket(index, tuple(slots), dtype)
        self._known[index] = (ids, described)
        return described
