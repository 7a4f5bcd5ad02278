"""A strategy: which option and compressor every tensor uses, and its versioned JSON file."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from espresso.strategies import fields
from espresso.strategies.cluster import Cluster
from espresso.strategies.fields import FormError, faults, number, scale, shown, whole
from espresso.strategies.option import UNCOMPRESSED, Option
from espresso.strategies.spec import NONE, CompressorSpec
from espresso.strategies.tree import parse_option

KIND = "espresso-strategy"
DEFAULT_PARTITION_BYTES = 4 * 1024 * 1024
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Gradient types by name, with their size in bytes."""

MAX_ELEMENTS = 1 << 40
"""Of a tensor."""

MAX_DIMENSIONS = 64
"""Of a tensor, as in PyTorch."""

MAX_PARTITIONS = 1 << 18
"""That one strategy may cut a model into."""


def ring_bytes(numel: int, dtype: str, num_ranks: int) -> int:
    """Bytes that every rank sends in a ring allreduce of so many numbers."""
    return round(2 * (num_ranks - 1) / num_ranks * numel * DTYPES[dtype])


class StrategyError(FormError):
    """A strategy or its file is malformed, or does not fit the model or the cluster it is used with."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A gradient tensor: name, shape, and dtype as text (``float32`` …)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        where = f"tensor {shown(self.name)}:"
        if self.dtype not in DTYPES:
            raise FormError(f"{where} dtype {shown(self.dtype)} is not one of {', '.join(DTYPES)}")
        if len(self.shape) > MAX_DIMENSIONS or any(size < 0 for size in self.shape):
            raise FormError(f"{where} shape {shown(self.shape)} has a negative size or over {MAX_DIMENSIONS} sizes")
        if self.numel > MAX_ELEMENTS:
            raise FormError(f"{where} shape {shown(self.shape)} has more than {MAX_ELEMENTS} elements")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Choice:
    """What is decided for one tensor: an option and the compressor its compressions use."""

    option: Option = UNCOMPRESSED
    compressor: CompressorSpec = NONE

    def __post_init__(self) -> None:
        if not self.option.is_compressed and self.compressor != NONE:
            raise StrategyError(
                f"option '{self.option}' never compresses, so its compressor must be 'none', not '{self.compressor}'"
            )


PLAIN = Choice()


def fingerprint(tensors: Iterable[TensorSpec], cluster: Cluster) -> str:
    """A digest of names, shapes, dtypes (in name order) and the cluster's shape; servers are no part of it."""
    digest = hashlib.sha256(f"{cluster.num_nodes}x{cluster.ranks_per_node}".encode())
    for tensor in sorted(tensors, key=lambda t: t.name):
        digest.update(f"\n{tensor.name}\t{tensor.shape}\t{tensor.dtype}".encode())
    return "sha256:" + digest.hexdigest()


@dataclass(frozen=True, repr=False)
class Strategy:
    """Tensor name to choice, with the global parameters and what it was made for.

    Attributes:
        choices: for every tensor of ``tensors``, by name.
        tensors: the model's tensors the strategy was made for.
        cluster: the cluster shape it was made for.
        partition_bytes: groups larger than this are cut and pipelined; 0 never cuts.
        bucket_cap_mb: the DDP bucket size the search assumed, if it had a say.
        gain_scale: by how much compressors' own feedback gains are multiplied, for the optimizer that it was found
            beside.
        notes: free text for people: who predicted what. Not part of equality or of the hash.
        elsewhere: choices for tensors that :meth:`over` left out. Not part of equality, of the hash, or of a file.

    Raises:
        StrategyError: a tensor without a choice, a choice without a tensor, an option the cluster cannot do.
    """

    tensors: tuple[TensorSpec, ...]
    choices: Mapping[str, Choice]
    cluster: Cluster
    partition_bytes: int = DEFAULT_PARTITION_BYTES
    bucket_cap_mb: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    elsewhere: Mapping[str, Choice] = field(default_factory=dict, compare=False)
    gain_scale: float = 1.0

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        _check_same_names(names, list(self.choices), "the strategy's tensor list", "its choices")
        with faults(StrategyError):
            whole(self.partition_bytes, "partition_bytes")
            if self.bucket_cap_mb is not None:
                number(self.bucket_cap_mb, "bucket_cap_mb", positive=True)
            scale(self.gain_scale, "gain_scale")
        partitions = sum(tensor.num_bytes for tensor in self.tensors) // (self.partition_bytes or sys.maxsize)
        if partitions > MAX_PARTITIONS:
            raise StrategyError(
                f"partition_bytes {self.partition_bytes} would cut the model into {partitions} partitions;"
                f" at most {MAX_PARTITIONS} are carried out"
            )
        for name, choice in self.choices.items():
            if choice.option.is_hierarchical and not self.cluster.is_hierarchical:
                raise StrategyError(
                    f"tensor {name!r}: option '{choice.option}' is hierarchical, but the cluster has {self.cluster};"
                    " only flat options can run there"
                )
        self._check_servers(self.cluster)

    def _check_servers(self, cluster: Cluster) -> None:
        for name, choice in self.choices.items():
            if choice.option.uses_servers and not cluster.num_servers:
                raise StrategyError(
                    f"tensor {name!r}: option '{choice.option}' goes through parameter servers, but the cluster has"
                    f" {cluster}; start the job with python -m espresso.launch --servers N"
                )

    def __repr__(self) -> str:
        """What it holds, without its tensors: there may be thousands."""
        compressors = ", ".join(sorted(map(str, self.compressors - {NONE}))) or NONE
        return f"<Strategy: {len(self.tensors)} tensors ({compressors}), on {self.cluster}>"

    @classmethod
    def uniform(
        cls,
        tensors: Iterable[TensorSpec],
        cluster: Cluster,
        choice: Choice = PLAIN,
        *,
        partition_bytes: int = DEFAULT_PARTITION_BYTES,
    ) -> Strategy:
        """The same choice for every tensor; by default plain flat allreduce."""
        tensors = tuple(tensors)
        return cls(tensors, {t.name: choice for t in tensors}, cluster, partition_bytes)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.tensors, self.cluster)

    @property
    def digest(self) -> str:
        """A hash of everything that changes what is executed; ranks compare it before they start."""
        body = self.to_json()
        body.pop("notes", None)
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, by name."""
        return {tensor.name: tensor.shape for tensor in self.tensors}

    @cached_property
    def num_compressed(self) -> int:
        """Tensors that have a compressor. Those that are too small for theirs travel as plain numbers all the same."""
        return sum(choice.compressor != NONE for choice in self.choices.values())

    @property
    def compresses(self) -> bool:
        """Whether any tensor has a compressor."""
        return self.num_compressed > 0

    @cached_property
    def in_payloads(self) -> frozenset[str]:
        """Tensors whose option compresses, whatever their compressor."""
        return frozenset(name for name, choice in self.choices.items() if choice.option.is_compressed)

    @cached_property
    def only_averages(self) -> bool:
        """Whether every tensor takes the one flat allreduce, as under plain DDP."""
        return all(choice == PLAIN for choice in self.choices.values())

    @property
    def compressors(self) -> set[CompressorSpec]:
        """Those that some tensor's choice names."""
        return {choice.compressor for choice in self.choices.values()}

    @property
    def num_through_servers(self) -> int:
        return sum(choice.option.uses_servers for choice in self.choices.values())

    def with_choices(self, changes: Mapping[str, Choice]) -> Strategy:
        """A copy in which the named tensors have other choices."""
        left_out = {name: changes.get(name, choice) for name, choice in self.elsewhere.items()}
        here = {name: choice for name, choice in changes.items() if name not in left_out}
        return replace(self, choices={**self.choices, **here}, elsewhere=left_out)

    def over(self, tensors: Iterable[TensorSpec]) -> Strategy:
        """The same choices for tensors of these names: shards of them, or the whole. What is new is not compressed.

        What is left out keeps its choice ``elsewhere``: it has it again in a copy over all.
        """
        tensors, known = tuple(tensors), self.known
        choices = {tensor.name: known.get(tensor.name, PLAIN) for tensor in tensors}
        elsewhere = {name: choice for name, choice in known.items() if name not in choices}
        return replace(self, tensors=tensors, choices=choices, elsewhere=elsewhere)

    @property
    def known(self) -> dict[str, Choice]:
        """The choices for its tensors, and for those elsewhere."""
        return {**self.elsewhere, **self.choices}

    def check_model(self, tensors: Iterable[TensorSpec], cluster: Cluster) -> None:
        """Check that this strategy was made for these tensors on this cluster.

        Raises:
            StrategyError: names the tensor or the cluster that differs.
        """
        theirs = {tensor.name: tensor for tensor in tensors}
        ours = {tensor.name: tensor for tensor in self.tensors}
        _check_same_names(list(theirs), list(ours), "the model", "the strategy")
        for name, tensor in theirs.items():
            if tensor != ours[name]:
                raise StrategyError(
                    f"tensor {name!r} is {tensor.dtype}{list(tensor.shape)} in the model but"
                    f" {ours[name].dtype}{list(ours[name].shape)} in the strategy; search again for this model"
                )
        if cluster.shape != self.cluster.shape:
            raise StrategyError(
                f"the strategy was made for {self.cluster}, this job runs on {cluster}; search again for this cluster"
            )
        self._check_servers(cluster)

    def to_json(self) -> dict[str, Any]:
        body = fields.head(KIND) | {
            "cluster": self.cluster.to_json(),
            "partition_bytes": self.partition_bytes,
            "bucket_cap_mb": self.bucket_cap_mb,
            "fingerprint": self.fingerprint,
            "tensors": [
                {
                    "name": tensor.name,
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype,
                    "option": str(self.choices[tensor.name].option),
                    "compressor": str(self.choices[tensor.name].compressor),
                }
                for tensor in self.tensors
            ],
            "notes": dict(self.notes),
        }
        return body if self.gain_scale == 1.0 else body | {"gain_scale": self.gain_scale}

    @classmethod
    def from_json(cls, body: Any) -> Strategy:
        """Read what ``to_json`` wrote.

        Raises:
            StrategyError: an unknown or missing key, an unknown option, a wrong type or a wrong fingerprint, by name.
        """
        with faults(StrategyError):
            found = fields.read_as(_File, fields.without_head(body, KIND), "the strategy")
            tensors = tuple(TensorSpec(row.name, row.shape, row.dtype) for row in found.tensors)
        choices = {row.name: row.choice() for row in found.tensors}
        strategy = cls(
            tensors, choices, found.cluster, found.partition_bytes, found.bucket_cap_mb, found.notes or {},
            gain_scale=found.gain_scale,
        )  # fmt: skip
        if found.fingerprint != strategy.fingerprint:
            raise StrategyError(
                f"fingerprint {shown(found.fingerprint)} does not match the file's own tensors and cluster"
                f" ({strategy.fingerprint}); the file was edited by hand or damaged"
            )
        return strategy

    def save(self, path: str | Path) -> None:
        """Write the strategy file (JSON, one tensor a line group, stable order)."""
        fields.save(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a strategy file.

        Raises:
            StrategyError: the file is not JSON or not a valid strategy; the message begins with the path.
            OSError: the file cannot be read.
        """
        return fields.load(path, cls.from_json, StrategyError)


@dataclass(frozen=True)
class _Row:
    """A tensor in a strategy file, and what is decided for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    option: str
    compressor: str

    def choice(self) -> Choice:
        try:
            return Choice(parse_option(self.option), CompressorSpec.parse(self.compressor))
        except ValueError as error:
            raise StrategyError(f"tensor {shown(self.name)}: {error}") from None


@dataclass(frozen=True)
class _File:
    """A strategy file, below its head."""

    cluster: Cluster
    partition_bytes: int
    fingerprint: str
    tensors: tuple[_Row, ...]
    bucket_cap_mb: float | None = None
    notes: Mapping[str, Any] | None = None
    gain_scale: float = 1.0


def _check_same_names(left: list[str], right: list[str], left_name: str, right_name: str) -> None:
    for names, others, has, lacks in (
        (left, set(right), left_name, right_name),
        (right, set(left), right_name, left_name),
    ):
        for name in names:
            if name not in others:
                raise StrategyError(f"tensor {name!r} is in {has} but not in {lacks}")
    if len(left) != len(set(left)):
        raise StrategyError(f"tensor {shown(fields.first_twice(left))} appears twice in {left_name}")
