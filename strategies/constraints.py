"""What a strategy must keep to, whatever it gains: the user's own limits on options, devices, tensors.

A pattern is a shell's (``*`` and ``?``, case counts). For tensors it is matched against the name, for options against
the text that strategy files have: ``*all_to_all*`` are all options with an all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from espresso.strategies.cluster import Cluster
from espresso.strategies.fields import FormError, shown, whole
from espresso.strategies.option import RANK_DEVICES
from espresso.strategies.spec import NONE, CompressorSpec
from espresso.strategies.strategy import PLAIN, Choice, TensorSpec
from espresso.strategies.tree import options_for, parse_option, round_options

VIA = " via "
"""Between compressor and option of a forced choice: ``fp16 via comp > flat.allreduce > dec``."""

FREE, EXACT = "", "exact"
"""Kinds of tensors: nothing is asked; never compressed. Any other kind is the text of a forced choice."""


@dataclass(frozen=True)
class Constraints:
    """Limits on the choices of every tensor. Plain allreduce is always allowed where nothing else is forced.

    Attributes:
        exact_vectors: tensors of at most one dimension and this many elements are never compressed.
        keep_exact: patterns of tensors that are never compressed.
        forbid: patterns of options that no tensor takes.
        devices: where compressions of ranks may run, ``training`` or ``offload``; empty: on both.
        most_compressions: that one tensor's option may have, 1 for no sum that is compressed again; None: any number.
        force: pattern of tensors to what they take: a compressor, or ``compressor via option``; the first that matches
            counts, before all other limits.

    Raises:
        FormError: a limit that is none, an unknown device or option.
    """

    exact_vectors: int = 0
    keep_exact: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    most_compressions: int | None = None
    force: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole(self.exact_vectors, "exact_vectors")
        for name in ("keep_exact", "forbid", "devices"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(text, str) for text in given):
                raise FormError(f"{name} is a list of texts, got {shown(given)}")
            object.__setattr__(self, name, tuple(given))
        known = [device.value for device in RANK_DEVICES]
        for device in self.devices:
            if device not in known:
                raise FormError(f"devices: {shown(device)} is not one of {', '.join(known)}")
        if self.most_compressions is not None:
            whole(self.most_compressions, "most_compressions")
        for pattern, text in self.force.items():
            try:
                parse_forced(text)
            except (ValueError, TypeError) as error:
                raise FormError(f"force[{shown(pattern)}]: {error}") from None

    def kind_of(self, tensor: TensorSpec) -> str:
        """``FREE``, ``EXACT``, or the text of what it is forced to. Tensors of a kind may take the same choices."""
        for pattern, text in self.force.items():
            if fnmatchcase(tensor.name, pattern):
                return text
        if len(tensor.shape) <= 1 and tensor.numel <= self.exact_vectors:
            return EXACT
        return EXACT if any(fnmatchcase(tensor.name, pattern) for pattern in self.keep_exact) else FREE

    def is_dropped(self, tensor: TensorSpec) -> bool:
        """Whether it is exact for being a small vector, which costs next to nothing wherever it travels."""
        return self.kind_of(tensor) == EXACT and len(tensor.shape) <= 1 and tensor.numel <= self.exact_vectors

    def allows(self, choice: Choice, kind: str = FREE) -> bool:
        """Whether tensors of a kind may take a choice."""
        if kind not in (FREE, EXACT):
            compressor, option = parse_forced(kind)
            is_it = compressor in (choice.compressor, choice.compressor.kept_as(""))
            return is_it and option in (None, str(choice.option))
        if choice == PLAIN:
            return True
        if choice.option.halves:  # what fp16 rounds away is in no budget
            return False
        if (kind == EXACT and choice.compressor != NONE) or self._forbids(str(choice.option)):
            return False
        if self.devices:
            devices = {step.device.value for step in choice.option.steps if step.device in RANK_DEVICES}
            if not devices <= set(self.devices):
                return False
        return self.most_compressions is None or choice.option.num_compressions <= self.most_compressions

    def of(self, choices: Iterable[Choice], kind: str) -> tuple[Choice, ...]:
        """Those that tensors of a kind may take, in their order."""
        if kind == FREE and not self.forbid and not self.devices and self.most_compressions is None:
            return tuple(choices)
        return tuple(choice for choice in choices if self.allows(choice, kind))

    def forced(self) -> tuple[CompressorSpec, ...]:
        """The compressors that some tensor is forced to."""
        return tuple(dict.fromkeys(parse_forced(text)[0] for text in self.force.values()))

    def idle(self, names: Sequence[str], cluster: Cluster) -> list[str]:
        """In words, the patterns that match no tensor or no option of a cluster: a slip of the pen, mostly."""
        example = f"; the first is {names[0]!r}" if names else ""
        found = [
            f"no tensor of this model is called {pattern!r}{example}: that limit does nothing"
            for pattern in (*self.keep_exact, *self.force)
            if not any(fnmatchcase(name, pattern) for name in names)
        ]
        options = options_for(cluster, summable=True) + round_options(cluster.is_hierarchical) if self.forbid else ()
        texts = [str(option) for option in options]
        return found + [
            f"no option on {cluster} is {pattern!r}: to forbid it does nothing; a part of one is written with stars,"
            " as in '*all_to_all*'"
            for pattern in self.forbid
            if not any(fnmatchcase(text, pattern) for text in texts)
        ]

    def _forbids(self, option: str) -> bool:
        return any(fnmatchcase(option, pattern) for pattern in self.forbid)

    @property
    def given(self) -> dict[str, Any]:
        """What differs from the defaults."""
        default = Constraints()
        return {name: value for name, value in vars(self).items() if value != getattr(default, name)}


@lru_cache(maxsize=256)
def parse_forced(text: str) -> tuple[CompressorSpec, str | None]:
    """The compressor and, if it is said, the option's text.

    >>> parse_forced("fp16 via comp > flat.allreduce > dec")[1]
    'comp > flat.allreduce > dec'

    Raises:
        ValueError, TypeError: it has not that form.
    """
    if not isinstance(text, str):
        raise TypeError(f"expected text such as 'fp16', got {type(text).__name__}")
    name, via, option = text.partition(VIA)
    return CompressorSpec.parse(name), str(parse_option(option.strip())) if via else None
