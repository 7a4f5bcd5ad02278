"""Espresso: gradient compression for PyTorch DDP and HSDP that is searched for, not guessed.

    state = espresso.register(ddp_model)

The public names are loaded when they are first used, so that ``import espresso.strategies`` needs nothing
but the standard library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from espresso import fsdp, optim
    from espresso.comm.errors import (
        DisagreementError,
        EspressoError,
        PeerError,
        ProtocolError,
        TopologyError,
        UnsupportedModelError,
    )
    from espresso.comm.hook import espresso_hook
    from espresso.live.config import Config
    from espresso.live.observe import ObservedJob, observe
    from espresso.live.parts import CheckpointError
    from espresso.live.register import register
    from espresso.live.state import EspressoState
    from espresso.strategies import (
        Choice,
        Cluster,
        CompressorSpec,
        Strategy,
        StrategyError,
        TensorSpec,
        parse_option,
    )

__version__ = "0.2.0"

__all__ = [
    "CheckpointError",
    "Choice",
    "Cluster",
    "CompressorSpec",
    "Config",
    "DisagreementError",
    "EspressoError",
    "EspressoState",
    "ObservedJob",
    "PeerError",
    "ProtocolError",
    "Strategy",
    "StrategyError",
    "TensorSpec",
    "TopologyError",
    "UnsupportedModelError",
    "__version__",
    "espresso_hook",
    "fsdp",
    "observe",
    "optim",
    "parse_option",
    "register",
]

_HOMES = {
    "comm.errors": (
        "DisagreementError", "EspressoError", "PeerError", "ProtocolError", "TopologyError", "UnsupportedModelError"
    ),
    "comm.hook": ("espresso_hook",),
    "live.parts": ("CheckpointError",),
    "live.config": ("Config",),
    "live.observe": ("ObservedJob", "observe"),
    "live.register": ("register",),
    "live.state": ("EspressoState",),
    "strategies": ("Choice", "Cluster", "CompressorSpec", "Strategy", "StrategyError", "TensorSpec", "parse_option"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use (PEP 562) and remember the name here."""
    if name in ("fsdp", "optim"):
        return import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
