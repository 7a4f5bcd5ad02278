"""What all ranks of a job must have alike."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from espresso.comm.environment import check_settings
from espresso.comm.errors import DisagreementError
from espresso.comm.groups import Groups


def agree(groups: Groups, mine: Mapping[str, Any]) -> None:
    """Compare settings. All ranks together; raises what :func:`espresso.comm.environment.check_settings` does."""
    check_settings(groups.all_objects(dict(mine)))


def agree_on_epoch(groups: Groups, epoch: int) -> None:
    """Compare which epoch begins. All ranks together, between two steps.

    Raises:
        DisagreementError: names the rank and both epochs.
    """
    everybody = groups.all_objects(epoch)
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            raise DisagreementError(
                f"rank {rank} says that epoch {theirs} begins, rank 0 says {everybody[0]}; call"
                " state.set_epoch on all ranks at the same step"
            )


def check_replicas(groups: Groups, parameters: Mapping[str, torch.Tensor]) -> None:
    """Compare parameters, bit for bit. All ranks together.

    Raises:
        DisagreementError: names the rank and the first tensor that differs from rank 0.
    """
    everybody = groups.all_objects({name: checksum(parameter) for name, parameter in parameters.items()})
    for rank, theirs in enumerate(everybody):
        for name, value in theirs.items():
            if value != everybody[0][name]:
                raise DisagreementError(f"parameter {name!r} on rank {rank} differs from rank 0: replicas diverged")


def checksum(parameter: torch.Tensor) -> int:
    """A checksum of a parameter's bytes."""
    flat = parameter.detach().cpu().contiguous().reshape(-1)  # a scalar cannot be viewed as bytes
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
