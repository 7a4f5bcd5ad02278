"""What differs between a job on the CPU and one on a GPU, chosen by where the model's parameters are.

A runtime makes the codecs and the executor, and says how costs are measured. Everything else is the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from espresso.comm.execute.device import CudaStreams, DeviceSide, Event
from espresso.comm.execute.executor import Executor
from espresso.comm.groups import Groups
from espresso.comm.memory import DeviceMemory
from espresso.compressors.cuda import CudaDevice
from espresso.compressors.cuda import Device as Accelerator
from espresso.live.codecs import DeviceCodecs, HostCodecs
from espresso.live.heap import give_freed_memory_back, keep_freed_memory
from espresso.live.observer import GradientClock
from espresso.live.profiler import Place
from espresso.model.costs import PAPER_CONTENTION, Contention, CopyCost
from espresso.model.links import KB

COPY_BYTES = (1 << 14, 1 << 24)
LAUNCHES = 20
PATIENCE_S = 60.0


class Runtime:
    """A job on the CPU."""

    host_copies = False

    def __init__(self) -> None:
        self.place = Place()
        keep_freed_memory()

    def codecs(self, offload_threads: int | None, offload_width: int | None) -> HostCodecs:
        """Where codecs come from."""
        return HostCodecs(offload_threads, offload_width)

    def executor(self, codecs: HostCodecs, groups: Groups, planner: Any, **more: Any) -> Executor:
        """What carries plans out."""
        return Executor(groups, codecs, planner, **more)

    def clock(self, module: torch.nn.Module, names: Mapping[int, str], executor: Executor) -> GradientClock:
        """What notes when gradients are ready."""
        return GradientClock(module, names)

    def copy_cost(self, groups: Groups) -> CopyCost | None:
        """Measured copies between device and host. Collective."""
        return None

    def contention(self, measured: Contention) -> Contention:
        """What shares what."""
        return measured

    def put_away(self) -> None:
        """Strategies have been tried: give back what only that needed."""
        give_freed_memory_back()


class DeviceClock(GradientClock):
    """Stamps with events: the host's clock says when backward was launched, not when it ran."""

    def __init__(self, module: torch.nn.Module, names: Mapping[int, str], streams: CudaStreams) -> None:
        self._streams = streams
        self._events: dict[str, Event] = {}
        self._forward_event: Event | None = None
        super().__init__(module, names)

    def _forward(self, *_: Any) -> None:
        self._forward_event = self._streams.record()

    def _stamp(self, name: str) -> Callable[[torch.Tensor], None]:
        def stamp(_: torch.Tensor) -> None:
            self._events[name] = self._streams.record()

        return stamp

    def read(self, at_ns: Callable[[Event], int] | None) -> None:
        """Turn events into times. Those that have not come are of a backward pass after the one that is asked for."""
        if at_ns is not None:
            came = {name: event for name, event in self._events.items() if self._streams.wait_here(event, 0.0)}
            self.ready_ns = {name: at_ns(event) for name, event in came.items()}
            forward = self._forward_event
            self.forward_ns = at_ns(forward) if forward is not None and self._streams.wait_here(forward, 0.0) else 0
        self._events = {}


class DeviceRuntime(Runtime):
    """A job on a GPU.

    Args:
        accelerator: launches kernels.
        streams: of the same device.
    """

    host_copies = True

    def __init__(self, accelerator: Accelerator, streams: CudaStreams) -> None:
        self.accelerator, self.streams = accelerator, streams
        self.memory = DeviceMemory(accelerator)
        self.place = Place(accelerator.torch_device, self._settle, self._time, self.memory.here, is_host=False)

    def codecs(self, offload_threads: int | None, offload_width: int | None) -> HostCodecs:
        return DeviceCodecs(self.accelerator, offload_threads, offload_width)

    def executor(self, codecs: HostCodecs, groups: Groups, planner: Any, **more: Any) -> Executor:
        assert isinstance(codecs, DeviceCodecs)
        side = DeviceSide(self.streams, self.memory, codecs.notes)
        return Executor(groups, codecs, planner, side=side, **more)

    def clock(self, module: torch.nn.Module, names: Mapping[int, str], executor: Executor) -> GradientClock:
        clock = DeviceClock(module, names, self.streams)
        executor.watch(clock)
        return clock

    def copy_cost(self, groups: Groups) -> CopyCost | None:
        """One way, pinned; the slower way and the slowest rank."""
        times = []
        for num_bytes in COPY_BYTES:
            here = torch.zeros(num_bytes, dtype=torch.uint8, device=self.accelerator.torch_device)
            there = self.memory.host.numbers(num_bytes, torch.uint8)
            both = [
                lambda h=here, t=there: t.copy_(h, non_blocking=True),
                lambda h=here, t=there: h.copy_(t, non_blocking=True),
            ]
            times.append(max(max(row) for row in groups.all_objects([self._time(call) for call in both])))
        small, large = times
        beta = max(large - small, 0.0) / (COPY_BYTES[1] - COPY_BYTES[0])
        return CopyCost(max(small - beta * COPY_BYTES[0], 0.0), beta * KB)

    def contention(self, measured: Contention) -> Contention:
        """The paper's: compression on the GPU holds backward up, what the host does holds nothing up."""
        return PAPER_CONTENTION

    def put_away(self) -> None:
        """Nothing: torch gives blocks back when it needs others."""

    def _settle(self) -> None:
        self.streams.wait_here(self.streams.record(), PATIENCE_S)

    def _time(self, call: Callable[[], object]) -> float:
        """Device microseconds of a call, one of several in a row."""
        call()
        self._settle()
        begin = self.streams.record()
        for _ in range(LAUNCHES):
            call()
        end = self.streams.record()
        self.streams.wait_here(end, PATIENCE_S)
        return self.streams.elapsed_us(begin, end) / LAUNCHES


def runtime_of(device: torch.device) -> Runtime:
    """The runtime of a job whose parameters are on ``device``.

    Raises:
        CudaUnavailableError: a CUDA device, and no CuPy.
    """
    if device.type == "cpu":
        return Runtime()
    accelerator = CudaDevice(device.index)
    return DeviceRuntime(accelerator, CudaStreams(accelerator.torch_device))
