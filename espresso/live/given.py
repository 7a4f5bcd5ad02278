"""What to exchange by, as the user gave it: a compressor for automatic mode, a strategy, a file, or a policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from espresso.compressors import registry
from espresso.compressors.schedule import Schedule, check_choices
from espresso.strategies import Cluster, CompressorSpec, Strategy, TensorSpec

AUTO = "auto"

AUTO_COMPRESSORS = (
    "bf16", "int8", "int4", "twobit", "twobit:block=64", "efsignsgd", "efsignsgd:block=64", "stc:ratio=0.1",
    "stc:ratio=0.03", "dgc:ratio=0.01", "dgc:least=2048,ratio=0.01", "powersgd:rank=2,start_iter=0",
    "powersgd:rank=8,start_iter=0",
)  # fmt: skip
"""What ``compressor="auto"`` may mix, tensor by tensor, beside plain numbers. Kernels are compiled in this order.

Nothing that overflows where plain numbers do not: a gradient above 65 504 would be infinite in half precision.
"""

CompressorLike = str | CompressorSpec | Sequence[str | CompressorSpec]

Policy = Callable[[tuple[TensorSpec, ...], Cluster], Strategy]
"""Makes a strategy from the model's tensors and the cluster, once both are known."""

StrategyLike = str | os.PathLike[str] | Strategy | Policy


@dataclass(frozen=True)
class Given:
    """Compressors and a strategy.

    Attributes:
        compressors: what automatic mode may use, one at least.
        strategy: None is automatic mode.
        source: the strategy's file.
    """

    compressors: tuple[CompressorSpec, ...]
    strategy: Strategy | Policy | None = None
    source: Path | None = None

    @property
    def compressor(self) -> CompressorSpec:
        """The first."""
        return self.compressors[0]

    @property
    def named(self) -> str:
        """The compressors in a line."""
        return AUTO if tuple(map(str, self.compressors)) == AUTO_COMPRESSORS else "; ".join(map(str, self.compressors))

    @classmethod
    def of(cls, compressor: CompressorLike, strategy: StrategyLike) -> Given:
        """Read and check what can be checked before the model is known.

        Raises:
            TypeError: neither what a compressor nor what a strategy may be.
            ValueError, StrategyError, OSError: an unknown compressor or parameter, a file that is no strategy.
        """
        listed: Sequence[object] = AUTO_COMPRESSORS if compressor == AUTO else (compressor,)
        if isinstance(compressor, Sequence) and not isinstance(compressor, str) and compressor:
            listed = compressor
        specs = tuple(dict.fromkeys(map(_spec, listed)))
        if strategy == AUTO:
            cls(specs).schedule()
            return cls(specs)
        source = Path(strategy) if isinstance(strategy, str | os.PathLike) else None
        given = _load(strategy) if isinstance(strategy, str | os.PathLike) else strategy
        if isinstance(given, Strategy):
            check_choices(given)
        elif not callable(given):
            raise TypeError(
                f"strategy must be 'auto', a path, a Strategy, or a function of tensors and cluster that makes one, got"
                f" {strategy!r:.80} ({type(strategy).__name__})"
            )
        found = cls(specs, given, source)
        found.schedule()
        return found

    def on(self, tensors: tuple[TensorSpec, ...], cluster: Cluster) -> Given:
        """The same for a model on a cluster: a policy's strategy is made.

        Raises:
            StrategyError: an option that does not fit its compressor.
        """
        if self.strategy is None or isinstance(self.strategy, Strategy):
            return self
        made = self.strategy(tensors, cluster)
        if not isinstance(made, Strategy):
            raise TypeError(f"the strategy's function must return a Strategy, got {made!r:.80} ({type(made).__name__})")
        check_choices(made)
        return replace(self, strategy=made)

    @property
    def specs(self) -> set[CompressorSpec]:
        """The compressors that may run."""
        return set(self.strategy.compressors) if isinstance(self.strategy, Strategy) else set(self.compressors)

    def schedule(self) -> Schedule:
        """How they change over a training."""
        return Schedule(self.specs)

    def __str__(self) -> str:
        return self.strategy.digest if isinstance(self.strategy, Strategy) else AUTO


def _spec(compressor: object) -> CompressorSpec:
    spec = CompressorSpec.parse(compressor) if isinstance(compressor, str) else compressor
    if not isinstance(spec, CompressorSpec):
        raise TypeError(
            f"compressor must be a text such as 'dgc:ratio=0.01' or a CompressorSpec, got {compressor!r:.80}"
            f" ({type(compressor).__name__}); several go in a list, and 'auto' leaves the choice to espresso"
        )
    registry.create(spec)
    return spec


def _load(path: str | os.PathLike[str]) -> Strategy:
    """A strategy's file; what is no file may be a misspelt "auto"."""
    if isinstance(path, str) and not Path(path).is_file() and (not path or get_close_matches(path, [AUTO])):
        raise ValueError(f"strategy={path!r} is no file; did you mean 'auto'?")
    return Strategy.load(Path(path))
