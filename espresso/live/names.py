"""Parameter names: what residuals, strategies and errors are keyed by, and what models are refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from espresso.comm.ddp_buckets import held_by
from espresso.comm.errors import UnsupportedModelError
from espresso.live.shards import Shards
from espresso.strategies import DTYPES, TensorSpec


@dataclass(frozen=True)
class BoundModel:
    """A model whose parameters have names.

    Attributes:
        module: as it was bound, wrapped in DDP or not. It may hold what holds this, so it is not kept alive.
        names: of the parameters whose gradients are averaged, by ``id``.
        tensors: the same, in the module's order.
        device: where they are.
        shards: what they are shards of (FSDP); None where every rank holds all of each (DDP).
        shards_in: finds them in the module, also while it holds whole ones instead (FSDP).
    """

    module: weakref.ref[torch.nn.Module]
    names: Mapping[int, str]
    tensors: tuple[TensorSpec, ...]
    device: torch.device
    shards: Shards | None = None
    shards_in: Callable[[torch.nn.Module], Iterable[Any]] | None = None

    @classmethod
    def of(cls, module: torch.nn.Module) -> BoundModel:
        """Bind a model.

        Raises:
            UnsupportedModelError: a parameter that cannot be exchanged, by name.
        """
        parameters = named_gradients(module)
        return cls(
            weakref.ref(module),
            {id(parameter): name for name, parameter in parameters.items()},
            tensor_specs(parameters),
            next((parameter.device for parameter in parameters.values()), torch.device("cpu")),
        )

    @property
    def wholes(self) -> tuple[TensorSpec, ...]:
        """The whole tensors, of all the model."""
        return self.tensors if self.shards is None else self.shards.wholes

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """By name, of shards what is here; none if the model is gone."""
        module, known = self.module(), {tensor.name for tensor in self.tensors}
        if module is None:
            return {}
        if self.shards_in is not None:
            return {self.names[id(each)]: each.to_local() for each in self.shards_in(module) if id(each) in self.names}
        named = _inner(module).named_parameters()
        return {said: parameter for name, parameter in named if (said := _uncompiled(name)) in known}


def named_gradients(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters DDP averages gradients of, by name (as in the module that is not wrapped, and not compiled).

    Raises:
        UnsupportedModelError: a parameter whose gradients cannot be exchanged, by name, with the remedy.
    """
    inner = _inner(module)
    ignored = getattr(inner, "_ddp_params_and_buffers_to_ignore", ())
    named = dict(inner.named_parameters())
    averaged = {id(each) for name, each in named.items() if each.requires_grad and name not in ignored}
    _check_sparse(inner, averaged)
    if isinstance(module, DistributedDataParallel):  # which keeps to what it was made of
        try:
            averaged = held_by(module)
        except RuntimeError:  # of sparse gradients it tells nothing
            _check_sparse(inner, {id(each) for name, each in named.items() if name not in ignored})
            raise
    parameters = {_uncompiled(name): each for name, each in named.items() if id(each) in averaged}
    for name, parameter in parameters.items():
        _check(name, parameter)
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(
            f"the model's parameters lie on several devices ({found}); use one device per process"
        )
    return parameters


def _uncompiled(name: str) -> str:
    """A parameter's name whether ``torch.compile`` was called or not, as PyTorch's own checkpoints have it."""
    return name.replace("_orig_mod.", "")


def _inner(module: torch.nn.Module) -> torch.nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def tensor_specs(parameters: dict[str, torch.nn.Parameter]) -> tuple[TensorSpec, ...]:
    """Names, shapes and dtypes, in the module's order."""
    return tuple(
        TensorSpec(name, tuple(parameter.shape), dtype_name(parameter.dtype)) for name, parameter in parameters.items()
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _check(name: str, parameter: torch.nn.Parameter) -> None:
    if parameter.is_meta:
        raise UnsupportedModelError(f"parameter {name!r} is on the meta device; materialise the model first")
    if parameter.is_complex():
        raise UnsupportedModelError(
            f"parameter {name!r} is complex ({dtype_name(parameter.dtype)}); compressors know real numbers only:"
            " store it as a real tensor with torch.view_as_real"
        )
    if dtype_name(parameter.dtype) not in DTYPES:
        raise UnsupportedModelError(
            f"parameter {name!r} has dtype {dtype_name(parameter.dtype)}; gradients may be {', '.join(DTYPES)}"
        )
    if parameter.device.type not in ("cpu", "cuda"):
        raise UnsupportedModelError(
            f"parameter {name!r} is on {parameter.device}; gradients may be on the CPU or on a CUDA device"
        )


def _check_sparse(module: torch.nn.Module, averaged: set[int]) -> None:
    """``averaged``: the parameters whose gradients are, by ``id``."""
    for name, child in module.named_modules():
        is_sparse = isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag) and child.sparse
        if is_sparse and any(id(parameter) in averaged for parameter in child.parameters()):
            raise UnsupportedModelError(
                f"module {name!r} makes sparse gradients; build it with sparse=False, a compressor makes them small"
            )
