"""Settings of a job: typed, with their ranges, checked before anything starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, get_args

from espresso.comm.member import LONGEST_S, MAX_CONNECTIONS
from espresso.compressors import create
from espresso.search.terms import AUTOMATIC, EXACT_VECTORS, Terms
from espresso.strategies import RESIDUAL_DTYPES
from espresso.strategies.constraints import Constraints

logger = logging.getLogger("espresso")

RecordSignal = Literal["SIGUSR1", "SIGUSR2"]
ResidualDtype = Literal["float32", "bf16", "int8"]
assert set(get_args(ResidualDtype)) == set(RESIDUAL_DTYPES)

MOST_ELEMENTS = 1 << 40
MOST_STEPS = 10**9
MOST_OWED = 1e6
"""Gradients: more than any compressor keeps back."""
MOST_MEASURED = 10_000
"""Steps in which automatic mode may measure or race: all of them train, but none with the winner."""

_ENVIRONMENT = {
    "ESPRESSO_TIMEOUT_S": ("timeout_s", float),
    "ESPRESSO_RANKS_PER_NODE": ("ranks_per_node", int),
    "ESPRESSO_ARTIFACTS_DIR": ("artifacts_dir", str),
}


class Settings(TypedDict, total=False):
    """Keyword settings of ``espresso.register``; :class:`Config` says what they mean."""

    timeout_s: float
    ranks_per_node: int | None
    error_budget: float | None
    residual_budget_mb: float | None
    all_kinds: bool
    exact_vectors: int
    keep_exact: Sequence[str]
    forbid: Sequence[str]
    devices: Sequence[str]
    most_compressions: int | None
    force: Mapping[str, str]
    partition_bytes: int | None
    seed: int
    transactional: bool
    residual_dtype: ResidualDtype
    feedback_gain: float | None
    offload_threads: int | None
    offload_width: int | None
    connections: int
    compile_beside: bool
    warmup_steps: int
    profile_steps: int
    race_steps: int
    race_rounds: int
    decide_by: int
    adapt: bool
    steps_per_epoch: int | None
    check_every: int
    artifacts_dir: str | os.PathLike[str] | None
    record_signal: RecordSignal | None


@dataclass(frozen=True)
class Range:
    """What a setting may be. The error of a wrong one names the setting, the value and the range.

    Attributes:
        wanted: it in words.
        kinds: types; a truth value is no number.
        fits: whether a value of such a type is in range.
    """

    wanted: str
    kinds: tuple[type, ...]
    fits: Callable[[Any], bool] = lambda value: True

    def check(self, name: str, value: Any) -> None:
        """Refuse a value.

        Raises:
            TypeError: it is of another type.
            ValueError: it is out of range.
        """
        if not isinstance(value, self.kinds) or (isinstance(value, bool) and bool not in self.kinds):
            raise TypeError(f"{name} must be {self.wanted}, got {value!r:.80} ({type(value).__name__})")
        if not self.fits(value):
            raise ValueError(f"{name} must be {self.wanted}, got {value!r:.80}")


def _whole(low: int, high: int, multiple: int = 1) -> Range:
    what = "a whole number" if multiple == 1 else f"a multiple of {multiple}"
    return Range(f"{what} from {low} to {high}", (int,), lambda value: low <= value <= high and value % multiple == 0)


def _real(high: float) -> Range:
    return Range(f"a number above 0 and up to {high:g}", (int, float), lambda value: 0 < value <= high)


def _least_0(high: float) -> Range:
    return Range(f"a number from 0 to {high:g}", (int, float), lambda value: 0 <= value <= high)


def _one_of(names: Collection[str]) -> Range:
    return Range(f"one of {', '.join(names)}", (str,), lambda value: value in names)


def _optional(inner: Range) -> Range:
    kinds = (*inner.kinds, type(None))
    return Range(f"{inner.wanted} or None", kinds, lambda value: value is None or inner.fits(value))


_TEXT_BY_TEXT = Range(
    "a dictionary of texts",
    (Mapping,),
    lambda value: all(isinstance(text, str) for row in value.items() for text in row),
)
_TEXTS = Range("a list of texts", (list, tuple), lambda value: all(isinstance(text, str) for text in value))
_PATH = Range("a path or None", (str, os.PathLike, type(None)))


def _in(allowed: Range) -> dict[str, Range]:
    return {"range": allowed}


@dataclass(frozen=True, repr=False)
class Config:
    """Settings of ``espresso.register``, each with its default. The message of a wrong one names its range.

    Attributes:
        timeout_s: a collective that takes longer fails, and so does a step that makes no progress. A rank that
            dies is noticed at once, through its closed connections; this is for one that hangs. Longer than
            the longest pause of a rank in which the others train on (an evaluation on rank 0, a checkpoint).
        ranks_per_node: overrides which ranks share a node; 1 leaves only the flat options.
        error_budget: gradients that automatic mode's strategy may owe, once error feedback has settled: 2 means that
            what a rank keeps back for itself is as large as two gradients (``docs/how_it_decides.md``). None: where
            there are several compressors to choose from 4, with Adam and its kin 2.5; any number for one that was
            named. By a forecast; with ``adapt`` it is measured too, and a strategy that is found to owe more is
            replaced where the search has a better one.
        residual_budget_mb: the most that residuals may take on a rank, in millions of bytes; to keep to it tensors may
            have theirs in fewer bits than ``residual_dtype`` says. None: any.
        all_kinds: automatic mode takes the fastest strategy, however many kinds of choices it has; otherwise one that
            is nearly as fast with fewer.
        exact_vectors: automatic mode leaves tensors of at most one dimension and this many elements uncompressed
            (biases, norms): there is next to nothing to save on them. 0 leaves none.
        keep_exact: names of tensors that automatic mode never compresses, with ``*`` and ``?``.
        forbid: options that it never takes, by the text they have in strategy files, with ``*`` and ``?``
            (``*all_to_all*``).
        devices: where it may compress, ``training`` or ``offload``; empty: on both.
        most_compressions: compressions that a tensor may go through; 1: no sum is compressed again.
        force: name of tensors, with ``*`` and ``?``, to the compressor that they take, or ``compressor via option``.
        partition_bytes: groups above this size are cut and pipelined; None lets the search decide.
        seed: of the shared random numbers.
        transactional: keep residuals untouched by a non-finite iteration. False halves residual memory,
            and a step with an inf or NaN then damages the residuals it touched.
        residual_dtype: how residuals are kept between iterations: ``float32``, ``bf16`` (half the memory) or ``int8``
            (a quarter, blocks of 256). The narrow ones lose a rounding in every iteration (``comm/keep/residual.py``).
            A compressor's own ``residual_dtype`` (``"efsignsgd:residual_dtype=int8"``) goes before it.
        feedback_gain: the part of what was not sent that is added to the next gradient, above 0 and up to 1, which is
            classical error feedback. Less damps its swing (``docs/convergence.md``); nothing is lost either way. None
            takes each compressor's own: 1/16 for signs, random-k, top-k and its kin (in strategies that automatic
            mode finds more beside less momentum than .9, and 1/32 for signs beside Adam); 1 for the others.
        offload_threads: threads of the host worker pool; None takes the cores this rank may use.
        offload_width: compressions at once on that pool; None takes one for each of its threads, and at most 8.
        connections: of each link between nodes, over which exchanges go in turn (Gloo; ``docs/long_networks.md``).
        compile_beside: kernels that are not on disk are compiled while plain steps run, and automatic mode begins when
            they are there. False: before the first step, which all ranks wait for.
        warmup_steps: plain steps before measuring (DDP rebuilds its buckets in the second).
        profile_steps: plain steps in which gaps are measured; up to twice as many where those are far apart.
        race_steps: steps of each block when strategies race against plain; the first of a block is not counted.
        race_rounds: how often the blocks alternate.
        decide_by: iterations after which automatic mode has decided. Until the race it trains on plain averages, the
            better for what is learnt first; 0 races as soon as the job is measured.
        adapt: watch the job, look at averages (the guard), and in automatic mode decide again when network, load or
            batch change (``docs/how_it_decides.md``). False: none of it. A strategy that is given is watched too.
        steps_per_epoch: what compressors that warm up by epochs count with; None waits for ``state.set_epoch``.
        check_every: compare parameters between ranks every so many steps; 0 never.
        artifacts_dir: where strategy, job and flight records are written; None writes nothing. What cannot be
            written is a warning, never an error.
        record_signal: ``SIGUSR1`` or ``SIGUSR2``: a rank that gets it writes its last steps, as ``state.record`` does,
            into ``artifacts_dir``, or else into the working directory (of a second model in a folder ``2``). None
            leaves signals alone.

    Raises:
        TypeError: a setting of another type.
        ValueError: a setting out of its range.
    """

    timeout_s: float = field(default=300.0, metadata=_in(_real(LONGEST_S)))
    ranks_per_node: int | None = field(default=None, metadata=_in(_optional(_whole(1, 1 << 16))))
    error_budget: float | None = field(default=None, metadata=_in(_optional(_least_0(MOST_OWED))))
    residual_budget_mb: float | None = field(default=None, metadata=_in(_optional(_least_0(MOST_ELEMENTS))))
    all_kinds: bool = field(default=False, metadata=_in(Range("True or False", (bool,))))
    exact_vectors: int = field(default=EXACT_VECTORS, metadata=_in(_whole(0, MOST_ELEMENTS)))
    keep_exact: Sequence[str] = field(default=(), metadata=_in(_TEXTS))
    forbid: Sequence[str] = field(default=(), metadata=_in(_TEXTS))
    devices: Sequence[str] = field(default=(), metadata=_in(_TEXTS))
    most_compressions: int | None = field(default=None, metadata=_in(_optional(_whole(0, 16))))
    force: Mapping[str, str] = field(default_factory=dict, metadata=_in(_TEXT_BY_TEXT))
    partition_bytes: int | None = field(default=None, metadata=_in(_optional(_whole(0, MOST_ELEMENTS))))
    seed: int = field(default=0, metadata=_in(_whole(0, (1 << 63) - 1)))
    transactional: bool = field(default=True, metadata=_in(Range("True or False", (bool,))))
    residual_dtype: ResidualDtype = field(default="float32", metadata=_in(_one_of(RESIDUAL_DTYPES)))
    feedback_gain: float | None = field(default=None, metadata=_in(_optional(_real(1.0))))
    offload_threads: int | None = field(default=None, metadata=_in(_optional(_whole(1, 1024))))
    offload_width: int | None = field(default=None, metadata=_in(_optional(_whole(1, 64))))
    connections: int = field(default=1, metadata=_in(_whole(1, MAX_CONNECTIONS)))
    compile_beside: bool = field(default=True, metadata=_in(Range("True or False", (bool,))))
    warmup_steps: int = field(default=4, metadata=_in(_whole(3, MOST_MEASURED)))
    profile_steps: int = field(default=8, metadata=_in(_whole(1, MOST_MEASURED)))
    race_steps: int = field(default=5, metadata=_in(_whole(3, MOST_MEASURED)))
    race_rounds: int = field(default=2, metadata=_in(_whole(1, MOST_MEASURED)))
    decide_by: int = field(default=58, metadata=_in(_whole(0, MOST_STEPS)))
    adapt: bool = field(default=True, metadata=_in(Range("True or False", (bool,))))
    steps_per_epoch: int | None = field(default=None, metadata=_in(_optional(_whole(1, MOST_STEPS))))
    check_every: int = field(default=0, metadata=_in(_whole(0, MOST_STEPS)))
    artifacts_dir: str | os.PathLike[str] | None = field(default=None, metadata=_in(_PATH))
    record_signal: RecordSignal | None = field(default=None, metadata=_in(_optional(_one_of(get_args(RecordSignal)))))

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            RANGES[name].check(name, value)
        for name in ("keep_exact", "forbid", "devices"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "force", dict(self.force))
        for text in self.terms.constraints.forced():
            create(text)

    def __repr__(self) -> str:
        """What differs from the defaults."""
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != (f.default if f.default is not MISSING else {})
        ]
        return f"Config({', '.join(changed)})"

    @property
    def shared(self) -> dict[str, Any]:
        """What must be equal on all ranks: every setting but where files are written."""
        return {name: value for name, value in vars(self).items() if name != "artifacts_dir"}

    @property
    def terms(self) -> Terms:
        """What automatic mode's search keeps to."""
        shared = {each.name for each in fields(Terms)} & {each.name for each in fields(self)}
        limits = Constraints(**{each.name: getattr(self, each.name) for each in fields(Constraints)})
        return replace(AUTOMATIC, constraints=limits, **{name: getattr(self, name) for name in shared})

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> Config:
        """A config from keyword arguments and the environment's overrides, which are logged when used.

        Raises:
            TypeError: an unknown keyword, by name; it says which is nearest.
            ValueError: a variable that is not what its setting may be.
        """
        known = [each.name for each in fields(cls)]
        unknown = next((name for name in keywords if name not in known), None)
        if unknown is not None:
            nearest = get_close_matches(unknown, known, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
            raise TypeError(f"espresso has no setting {unknown!r}{hint} Settings are {', '.join(sorted(known))}")
        return cls(**overridden(keywords))


RANGES: dict[str, Range] = {each.name: each.metadata["range"] for each in fields(Config)}
"""What each setting may be."""


def overridden(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the environment's overrides, which are logged when used.

    Raises:
        ValueError: names the variable, its value and its range.
    """
    values = dict(settings)
    for variable, (name, kind) in _ENVIRONMENT.items():
        text = os.environ.get(variable)
        if text:  # an empty one says nothing
            allowed = RANGES[name]
            try:
                values[name] = kind(text)
                allowed.check(variable, values[name])
            except ValueError:
                wanted = allowed.wanted.removesuffix(" or None")  # which is what a variable that is not set says
                raise ValueError(f"{variable} must be {wanted}, got {text!r:.80}") from None
            logger.info("%s=%s overrides %s", variable, text, name)
    return values
