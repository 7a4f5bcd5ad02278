"""Espresso: gradient compression for PyTorch DDP that is searched for, not guessed.

    state = espresso.register(ddp_model, compressor="dgc:ratio=0.01", strategy="auto")

The public names are loaded when they are first used, so that ``import espresso.strategies`` needs nothing
but the standard library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from espresso.comm.hook import espresso_hook
    from espresso.live.state import EspressoState, register
    from espresso.strategies import Strategy

__version__ = "0.2.0"

__all__ = ["EspressoState", "Strategy", "__version__", "espresso_hook", "register"]

_HOMES = {
    "EspressoState": "espresso.live.state",
    "Strategy": "espresso.strategies",
    "espresso_hook": "espresso.comm.hook",
    "register": "espresso.live.state",
}


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use (PEP 562) and remember the name here."""
    if name == "optim":
        return import_module("espresso.optim")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
