"""One of PyTorch's own DDP tests on one rank, with our hook put under every DDP model at its first forward pass.

Imported once, in the server that ranks are forked from: PyTorch's module reads the environment when it is imported.
Most of its tests ask for GPUs and need none: they run on the CPU here, where every device that they name is the CPU.
What then fails with plain DDP is left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "3")
os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29501")

import torch
import torch.testing._internal.common_distributed as common

common.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
common.skip_if_no_gpu = lambda test: test

from torch.nn.modules.module import register_module_forward_pre_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)

import espresso  # noqa: E402
from espresso.strategies import Choice, Cluster, Strategy, TensorSpec, parse_option  # noqa: E402

PLAIN = "plain"
_STATES: list[espresso.EspressoState] = []


class Tests(TestDistBackend, DistributedTest._DistTestBase):
    """PyTorch's tests, as its own runner makes them."""


def _none(tensors: tuple[TensorSpec, ...], cluster: Cluster) -> Strategy:
    return Strategy.uniform(tensors, cluster, partition_bytes=0)


def _allgather(tensors: tuple[TensorSpec, ...], cluster: Cluster) -> Strategy:
    choice = Choice(parse_option("comp > flat.allgather > dec"))
    return Strategy.uniform(tensors, cluster, choice, partition_bytes=0)


STRATEGIES: dict[str, Any] = {"none": _none, "allgather": _allgather, "auto": "auto"}


class _OnCpu(TorchFunctionMode):
    """Every device that a test names is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_here, args[1:]))
        return func(
            *args, **{name: _here(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        )


def _here(where: Any) -> Any:
    is_number = isinstance(where, int) and not isinstance(where, bool)
    return "cpu" if is_number or str(where).startswith("cuda") else where


def _take_gpus_away() -> None:
    module: Any = torch.nn.Module
    cuda: Any = torch.cuda
    ddp: Any = DistributedDataParallel
    to, make = module.to, ddp.__init__
    module.cuda = lambda self, *_: self
    module.to = lambda self, *args, **kwargs: to(self, *map(_here, args), **{n: _here(v) for n, v in kwargs.items()})
    for name in ("set_device", "manual_seed", "synchronize", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.device = lambda *_: nullcontext()
    cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])

    def on_cpu(self: Any, net: Any, *args: Any, **kwargs: Any) -> None:
        make(self, net, *([None] * min(len(args), 2)), *args[2:], **{**kwargs, **_no_devices(kwargs)})

    ddp.__init__ = on_cpu


def _no_devices(given: dict[str, Any]) -> dict[str, None]:
    return {name: None for name in ("device_ids", "output_device") if name in given}


def _put_under_every_model(mode: str) -> None:
    """At the first forward pass, unless the test has registered a hook itself."""

    @torch.compiler.disable  # else what registering does would be traced, where a test compiles its model
    def look(module: torch.nn.Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel) and not hasattr(module, "_seen_by_espresso"):
            object.__setattr__(module, "_seen_by_espresso", True)
            has_gradients = any(parameter.requires_grad for parameter in module.parameters())
            if has_gradients and torch.is_grad_enabled() and not module._comm_hooks:
                state = espresso.register(
                    module, "efsignsgd", STRATEGIES[mode], ranks_per_node=1, timeout_s=20.0, offload_threads=1
                )
                _STATES.append(state)

    register_module_forward_pre_hook(look)


def run_rank(rank: int, mode: str, test: str, folder: str, answers: Any) -> None:
    """Run a test; answers (rank, exit code, traceback, models with our hook). 0 passed, else PyTorch's codes."""
    os.environ |= {"TEMP_DIR": folder, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    sys.stdout = sys.stderr = open(Path(folder) / f"rank{rank}.log", "w")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if mode != PLAIN:
        _put_under_every_model(mode)
    code, text = 1, ""
    _take_gpus_away()
    try:
        with _OnCpu():
            run: Any = Tests._run
            run(rank, test, str(Path(folder) / "store"), _Pipe(answers, rank))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        text = traceback.format_exc()
    answers.put((rank, code, text, len(_STATES)))
    answers.close()
    answers.join_thread()
    sys.stdout.flush()
    os._exit(0)


class _Pipe:
    """What PyTorch's runner sends a traceback through; it also listens on a pipe for the wish for one."""

    def __init__(self, answers: Any, rank: int) -> None:
        self._answers, self._rank = answers, rank
        self._read, self._write = os.pipe()
        self.closed = False

    def fileno(self) -> int:
        return self._read

    def send(self, text: str) -> None:
        self._answers.put((self._rank, None, text, len(_STATES)))

    def close(self) -> None:
        self.closed = True
