"""A strategy: which option and compressor every tensor uses, and its versioned JSON file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from espresso.strategies.cluster import Cluster
from espresso.strategies.option import UNCOMPRESSED, Option
from espresso.strategies.spec import NONE, CompressorSpec
from espresso.strategies.tree import parse_option

SCHEMA_VERSION = 1
DEFAULT_PARTITION_BYTES = 4 * 1024 * 1024
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Gradient types by name, with their size in bytes."""


class StrategyError(ValueError):
    """A strategy or its file is malformed, or does not fit the model or the cluster it is used with."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A gradient tensor: name, shape, and dtype as text (``float32`` …)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r}: shape {self.shape} has a negative size")

    @property
    def numel(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product

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


@dataclass(frozen=True)
class Strategy:
    """Tensor name to choice, with the global parameters and what it was made for.

    Attributes:
        choices: for every tensor of ``tensors``, by name.
        tensors: the model's tensors the strategy was made for.
        cluster: the cluster shape it was made for.
        partition_bytes: groups larger than this are cut and pipelined; 0 never cuts.
        bucket_cap_mb: the DDP bucket size the search assumed, if it had a say.
        notes: free text for people: who predicted what. Not part of equality or of the hash.

    Raises:
        StrategyError: a tensor without a choice, a choice without a tensor, an option the cluster cannot do.
    """

    tensors: tuple[TensorSpec, ...]
    choices: Mapping[str, Choice]
    cluster: Cluster
    partition_bytes: int = DEFAULT_PARTITION_BYTES
    bucket_cap_mb: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        _check_same_names(names, list(self.choices), "the strategy's tensor list", "its choices")
        if not isinstance(self.partition_bytes, int) or self.partition_bytes < 0:
            raise StrategyError(f"partition_bytes must be a whole number of at least 0, got {self.partition_bytes!r}")
        for name, choice in self.choices.items():
            if choice.option.is_hierarchical and not self.cluster.is_hierarchical:
                raise StrategyError(
                    f"tensor {name!r}: option '{choice.option}' is hierarchical, but the cluster has {self.cluster};"
                    " only flat options can run there"
                )
            if choice.option.uses_servers and not self.cluster.num_servers:
                raise StrategyError(_no_servers(name, choice, self.cluster))

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
        return sum(choice.option.is_compressed for choice in self.choices.values())

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

    @property
    def num_offloaded(self) -> int:
        return sum(choice.option.uses_offload for choice in self.choices.values())

    def with_choices(self, changes: Mapping[str, Choice]) -> Strategy:
        """A copy in which the named tensors have other choices."""
        return replace(self, choices={**self.choices, **changes})

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
        for name, choice in self.choices.items():
            if choice.option.uses_servers and not cluster.num_servers:
                raise StrategyError(_no_servers(name, choice, cluster))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "espresso-strategy",
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

    @classmethod
    def from_json(cls, body: Any) -> Strategy:
        """Read what ``to_json`` wrote.

        Raises:
            StrategyError: an unknown or missing key, an unknown option, a wrong type or a wrong fingerprint, by name.
        """
        _check_kind(body)
        _check_keys(body, "the strategy", _REQUIRED, {"bucket_cap_mb", "notes"})
        if body["schema_version"] != SCHEMA_VERSION:
            raise StrategyError(
                f"schema_version {body['schema_version']!r} is not supported; this version reads {SCHEMA_VERSION}"
            )
        if body["kind"] != "espresso-strategy":
            raise StrategyError(f"kind is {body['kind']!r}, expected 'espresso-strategy'")
        _check_keys(body["cluster"], "cluster", {"num_nodes", "ranks_per_node"}, {"num_servers", "colocated"})
        if not isinstance(body["tensors"], list):
            raise StrategyError(f"tensors must be a list, got {type(body['tensors']).__name__}")
        try:
            cluster = Cluster(**body["cluster"])
        except ValueError as error:
            raise StrategyError(str(error)) from None
        tensors, choices = _read_tensors(body["tensors"])
        cap = body.get("bucket_cap_mb")
        if cap is not None and not (isinstance(cap, int | float) and cap > 0):
            raise StrategyError(f"bucket_cap_mb must be a positive number or null, got {cap!r}")
        notes = body.get("notes") or {}
        if not isinstance(notes, dict):
            raise StrategyError(f"notes must be an object, got {type(notes).__name__}")
        strategy = cls(tuple(tensors), choices, cluster, body["partition_bytes"], cap, notes)
        if body["fingerprint"] != strategy.fingerprint:
            raise StrategyError(
                f"fingerprint {body['fingerprint']!r} does not match the file's own tensors and cluster"
                f" ({strategy.fingerprint}); the file was edited by hand or damaged"
            )
        return strategy

    def save(self, path: str | Path) -> None:
        """Write the strategy file (JSON, one tensor a line group, stable order)."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a strategy file.

        Raises:
            StrategyError: the file is not JSON or not a valid strategy; the message begins with the path.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise StrategyError(f"{path}: not a JSON file ({error})") from None
        except StrategyError as error:
            raise StrategyError(f"{path}: {error}") from None


def _no_servers(name: str, choice: Choice, cluster: Cluster) -> str:
    return (
        f"tensor {name!r}: option '{choice.option}' goes through parameter servers, but the cluster has {cluster};"
        " start the job with python -m espresso.launch --servers N"
    )


_REQUIRED = {"schema_version", "kind", "cluster", "partition_bytes", "fingerprint", "tensors"}
_TENSOR_KEYS = {"name", "shape", "dtype", "option", "compressor"}


def _read_tensors(rows: list[Any]) -> tuple[list[TensorSpec], dict[str, Choice]]:
    tensors: list[TensorSpec] = []
    choices: dict[str, Choice] = {}
    for position, row in enumerate(rows):
        _check_keys(row, f"tensors[{position}]", _TENSOR_KEYS, set())
        name = row["name"]
        if not isinstance(name, str):
            raise StrategyError(f"tensors[{position}]: name must be text, got {name!r}")
        if name in choices:
            raise StrategyError(f"tensor {name!r} appears twice")
        if not isinstance(row["shape"], list) or not all(type(size) is int for size in row["shape"]):
            raise StrategyError(f"tensor {name!r}: shape must be a list of whole numbers, got {row['shape']!r}")
        try:
            tensors.append(TensorSpec(name, tuple(row["shape"]), row["dtype"]))
            choices[name] = Choice(parse_option(row["option"]), CompressorSpec.parse(row["compressor"]))
        except (ValueError, TypeError) as error:
            raise StrategyError(f"tensor {name!r}: {error}") from None
    return tensors, choices


def _check_kind(body: Any) -> None:
    """Say what a file of another kind is, before anything is said of its keys."""
    kind = body.get("kind") if isinstance(body, dict) else None
    if isinstance(kind, str) and kind.startswith("espresso-") and kind != "espresso-strategy":
        name = kind.removeprefix("espresso-")
        raise StrategyError(f"this is a {name} file, and a strategy file is wanted here")


def _check_keys(body: Any, where: str, required: set[str], optional: set[str]) -> None:
    if not isinstance(body, dict):
        raise StrategyError(f"{where} must be a JSON object, got {type(body).__name__}")
    unknown = sorted(set(body) - required - optional)
    if unknown:
        raise StrategyError(f"{where} has an unknown key {unknown[0]!r}; known are {sorted(required | optional)}")
    missing = sorted(required - set(body))
    if missing:
        raise StrategyError(f"{where} lacks the key {missing[0]!r}")


def _check_same_names(left: list[str], right: list[str], left_name: str, right_name: str) -> None:
    for names, others, has, lacks in (
        (left, set(right), left_name, right_name),
        (right, set(left), right_name, left_name),
    ):
        for name in names:
            if name not in others:
                raise StrategyError(f"tensor {name!r} is in {has} but not in {lacks}")
    if len(left) != len(set(left)):
        twice = next(name for name in left if left.count(name) > 1)
        raise StrategyError(f"tensor {twice!r} appears twice in {left_name}")
