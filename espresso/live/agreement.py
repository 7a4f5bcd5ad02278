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
    check_settings(groups.by_rank(dict(mine)))


def agree_on_epoch(groups: Groups, epoch: int) -> None:
    """Compare which epoch begins. All ranks together, between two steps.

    Raises:
        DisagreementError: names the rank and both epochs.
    """
    everybody, first = groups.by_rank(epoch), groups.ranks[0]
    for rank, theirs in everybody.items():
        if theirs != everybody[first]:
            raise DisagreementError(
                f"rank {rank} says that epoch {theirs} begins, rank {first} says {everybody[first]}; call"
                " state.set_epoch on all ranks at the same step"
            )


def check_replicas(groups: Groups, parameters: Mapping[str, torch.Tensor]) -> None:
    """Compare parameters, bit for bit. All ranks together.

    Args:
        parameters: by name; none on a rank that is not compared.

    Raises:
        DisagreementError: names the rank and the first tensor that differs from the first compared rank's.
    """
    everybody = groups.by_rank({name: checksum(parameter) for name, parameter in parameters.items()})
    first = next((rank for rank, theirs in everybody.items() if theirs), groups.ranks[0])
    for rank, theirs in everybody.items():
        for name, value in theirs.items():
            if value != everybody[first][name]:
                raise DisagreementError(
                    f"parameter {name!r} on rank {rank} differs from rank {first}: replicas diverged; nothing but equal"
                    " optimizers may change parameters. Go on from a checkpoint that all ranks load"
                )


def checksum(parameter: torch.Tensor) -> int:
    """A checksum of a parameter's bytes."""
    flat = parameter.detach().cpu().contiguous().reshape(-1)  # a scalar cannot be viewed as bytes
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
