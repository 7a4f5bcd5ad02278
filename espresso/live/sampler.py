"""Some numbers of profiled iterations' gradients, from which it is measured what compressors keep back of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nlargest

import numpy as np
import torch

from espresso.search.error_budget import RUNS, SAMPLED_STEPS, Sample, stretches_of
from espresso.strategies import Bucket, TensorSpec

MOST_SAMPLED = 1 << 17
"""Elements of a whole model: measuring ten compressors on as many takes a second or two of one core."""

LEAST_SAMPLED = 64 * RUNS
"""Of a tensor, if it has as many; so only that many tensors are sampled, the largest. The others count little, and as
normal numbers."""


class Sampler:
    """Takes the same elements of every large tensor in each iteration while it is on; only on rank 0, which decides.

    Attributes:
        is_on: whether the iteration under way is sampled.
    """

    def __init__(self, tensors: Sequence[TensorSpec], rank: int) -> None:
        some = [tensor for tensor in tensors if tensor.numel]
        largest = nlargest(MOST_SAMPLED // LEAST_SAMPLED, some, key=lambda tensor: tensor.numel)
        most = MOST_SAMPLED // max(len(largest), 1)
        self._tensors = {tensor.name: tensor for tensor in largest}
        self._where = {name: stretches_of(tensor, most) for name, tensor in self._tensors.items()}
        self._taken: dict[str, list[torch.Tensor]] = {name: [] for name in self._tensors}
        self._rank, self.is_on = rank, False

    def see(self, buffer: torch.Tensor, describe: Callable[[], Bucket]) -> Bucket:
        """A bucket is about to be exchanged; what it holds."""
        bucket = describe()
        if self.is_on and self._rank == 0:
            self._take(bucket, buffer)
        return bucket

    def _take(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        for slot in bucket.slots:
            taken = self._taken.get(slot.tensor)
            if taken is None:
                continue
            here = buffer[slot.offset : slot.offset + slot.numel].detach()
            taken.append(torch.cat([here[start : start + numel] for start, numel in self._where[slot.tensor]]))
            del taken[:-SAMPLED_STEPS]

    def samples(self) -> list[Sample]:
        """What was taken, on the host; iterations with an inf or NaN in them are left out, and tensors that were not in
        all of them.
        """
        most = max(map(len, self._taken.values()), default=0)
        used = [(self._tensors[name], taken) for name, taken in self._taken.items() if 0 < len(taken) == most]
        here = [[values.to("cpu", torch.float32).numpy() for values in taken] for _, taken in used]
        steps = [rows for rows in zip(*here, strict=False) if all(np.isfinite(values).all() for values in rows)]
        if not steps:
            return []
        by_tensor = zip(used, zip(*steps, strict=True), strict=True)
        return [Sample(tensor, np.stack(rows)) for (tensor, _), rows in by_tensor]
