"""What the optimizers here share: the step with its closure, refusals by name, moments that keep their type."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, StateDict

Group = dict[str, Any]

_HALVES = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter's step: all of one shape. ``grad`` has the parameter's dtype, the moments the work dtype.

    Attributes:
        step: counted from 1.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int


@dataclass(frozen=True, slots=True)
class Settings:
    """A group's numbers; see :class:`espresso.optim.LANS`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    maximize: bool

    def corrections(self, step: int) -> tuple[float, float]:
        """1 - β1^t and 1 - β2^t, or ones."""
        if not self.bias_correction:
            return 1.0, 1.0
        return 1.0 - self.beta1**step, 1.0 - self.beta2**step


class AdaptiveOptimizer(Optimizer):
    """Two moments per parameter, in float32 where the parameter is float16 or bfloat16.

    A second moment of normalised gradients of a large tensor underflows in float16, and a decay of 0.999 does nothing
    in bfloat16. The parameters themselves keep their type; there are no master weights.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        check_settings(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            TypeError: a parameter that is not of real floating-point numbers, by name.
        """
        super().add_param_group(param_group)
        try:
            check_settings(param_group)
            for index, param in enumerate(param_group["params"]):
                if not param.is_floating_point():
                    raise TypeError(
                        f"{type(self).__name__} optimizes real floating-point parameters;"
                        f" {_name(param_group, index)} is {param.dtype}"
                        + ("; store it as a real tensor with torch.view_as_real" if param.is_complex() else "")
                    )
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient.

        Args:
            closure: evaluates the model anew and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a sparse gradient, by name; no parameter of its group has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rows = self._rows(group)
            if rows:
                self._step_group(group, rows)
        self._after_step()
        return loss

    @abstractmethod
    def _step_group(self, group: Group, rows: list[Row]) -> None:
        """Step the parameters of one group."""

    def _after_step(self) -> None:
        """After all parameters have been stepped."""

    def _rows(self, group: Group) -> list[Row]:
        found = [(index, param) for index, param in enumerate(group["params"]) if param.grad is not None]
        for index, param in found:
            if param.grad.is_sparse:
                raise RuntimeError(
                    f"{type(self).__name__} does not take sparse gradients, and {_name(group, index)} has one;"
                    " build the embedding with sparse=False"
                )
        return [self._row(param) for _, param in found]

    def _row(self, param: Tensor) -> Row:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)  # halves, as a default, would stop counting
            for name in MOMENTS:
                state[name] = torch.zeros_like(
                    param, dtype=work_dtype(param.dtype), memory_format=torch.preserve_format
                )
        state["step"] += 1
        assert param.grad is not None
        return Row(param, param.grad, state["exp_avg"], state["exp_avg_sq"], int(state["step"]))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As :meth:`torch.optim.Optimizer.load_state_dict`, which would round the moments to the parameter's type."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params, strict=True):
            kept: dict[str, Tensor] = state_dict["state"].get(number) or {}
            for name in MOMENTS if kept and param.dtype in _HALVES else ():
                value = kept[name]
                self.state[param][name] = value.detach().to(param.device, work_dtype(param.dtype), copy=True)


def by_kind(rows: list[Row]) -> list[list[Row]]:
    """Rows of one device and type together: those can share multi-tensor calls. Empty parameters are left out."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Row]] = {}
    for row in rows:
        if row.param.numel():
            kinds.setdefault((row.param.device, row.param.dtype), []).append(row)
    return list(kinds.values())


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which a parameter's step is computed and its moments are kept."""
    return torch.float32 if dtype in _HALVES else dtype


def check_settings(group: Group) -> None:
    """Refuse settings out of range, by name and value.

    Raises:
        ValueError: a negative rate, decay or epsilon, or a beta outside [0, 1).
    """
    for name in ("lr", "eps", "weight_decay"):
        if name in group and not float(group[name]) >= 0.0:
            raise ValueError(f"{name} must be at least 0, got {group[name]!r}")
    betas = group.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 to below 1, got {betas!r}")


def _name(group: Group, index: int) -> str:
    names = group.get("param_names")
    shape = list(group["params"][index].shape)
    return f"parameter {names[index]!r}" if names else f"a parameter of shape {shape}"
