"""What ``register`` and the first hook call refuse, by name, and that no rank hangs over it."""

import copy
import json
import logging
import pickle
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_groups
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import espresso
from espresso.comm.errors import UnsupportedModelError
from espresso.comm.hook import espresso_hook
from espresso.comm.messages import PLAIN
from espresso.live.checkpoint import Checkpoint
from espresso.live.names import BoundModel, named_gradients
from espresso.live.state import EspressoState
from espresso.strategies import Cluster, Device
from tests.ddp import (
    ALLGATHER,
    HIERARCHICAL,
    SHARDED,
    Played,
    Said,
    agreed,
    batch,
    mlp,
    registered,
    strategy_for,
    train,
    wrap,
)

METRICS = {
    "espresso/bytes_sent",
    "espresso/bytes_raw",
    "espresso/residual_norm",
    "espresso/predicted_step_us",
    "espresso/measured_step_us",
}


@pytest.mark.parametrize(
    ("what", "parts"),
    {
        "not DDP": ("TypeError", "needs a DistributedDataParallel model, got Linear"),
        "unknown setting": ("TypeError", "no setting 'colour'", "timeout_s"),
        "registered twice": ("UnsupportedModelError", "a communication hook already (espresso_hook)"),
        "setting out of range": ("ValueError", "timeout_s must be a number above 0 and up to 1e+06, got 0"),
        "unknown compressor": ("'zip'", "efsignsgd"),
        "unknown parameter": ("'rate'", "ratio"),
        "malformed spec": ("ValueError", "'ratio' is not key=value"),
        "no such file": ("FileNotFoundError", "nowhere.json"),
        "not JSON": ("StrategyError", "not a JSON file"),
        "unknown key": ("StrategyError", "strategy.json", "unknown key 'colour'"),
        "unknown option": ("StrategyError", "tensor '0.weight'", "flat.telepathy"),
        "wrong fingerprint": ("StrategyError", "fingerprint 'abc'"),
        "missing tensor": ("StrategyError", "'2.bias' is in the model but not in the strategy"),
        "extra tensor": ("StrategyError", "'4.weight' is in the strategy but not in the model"),
        "other shape": ("StrategyError", "'0.weight'", "[30, 20] in the model", "[31, 20] in the strategy"),
        "other cluster": ("StrategyError", "this job runs on"),
        "hierarchical on one level": ("StrategyError", "hierarchical"),
        "sparse embedding": ("UnsupportedModelError", "module '0' makes sparse gradients", "sparse=False"),
        "sparse, frozen once wrapped": ("UnsupportedModelError", "module '0' makes sparse gradients", "sparse=False"),
        "complex": ("UnsupportedModelError", "parameter '0.weight' is complex", "view_as_real"),
        "meta": ("UnsupportedModelError", "parameter 'weight' is on the meta device"),
        "torch.compile": ("UnsupportedModelError", "tuple instead of a DDP bucket", "torch.compile"),
        "unbound": ("EspressoError", "state.bind(model)"),
        "bound to another model": ("Error: ", "that the bound model does not have"),
        "uneven nodes": ("TopologyError", "ranks_per_node=3 does not divide the 2 ranks"),
        "scale": ("ValueError", "loss scale must be positive and finite, got 0.0"),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_what_is_wrong(played, what, parts):
    for messages in played(refusals):
        for part in parts:
            assert part in messages[what], messages[what]


@pytest.mark.parametrize("what", ["compressor", "settings", "model", "strategy", "ranks_per_node"])
def test_ranks_that_disagree_are_told_on_every_rank(played, what):
    named = {"settings": "seed than rank 0 (0 on rank 0, 5 on rank 1)", "model": "tensor '2.weight' than rank 0"}
    for messages in played(disagreements):
        assert messages[what].startswith("DisagreementError: rank 1 has another"), messages[what]
        assert f"another {named.get(what, f'{what} than rank 0')}" in messages[what]


def test_ranks_of_different_builds_are_told_on_every_rank(played):
    for messages in played(disagreements):
        assert messages["build"].startswith("DisagreementError: rank 1 runs espresso"), messages["build"]
        assert "+other" in messages["build"]


def test_state_built_before_the_model_is_wrapped(played):
    """As Lightning does: the state comes first, and is bound before or after the hook is registered."""
    for equal in played(late_binding):
        assert equal == [True, True, True]


def test_strategy_from_a_file(played):
    for option in played(from_file):
        assert option == SHARDED


def test_metrics(played):
    for before, after, steps in played(metrics):
        assert set(before) >= METRICS
        told = {f"espresso/{what}/{group}" for what in ("deviation", "residual_ratio", "lost") for group in ("0", "2")}
        assert set(before) | told == set(after), "what the guard says comes with its first check"
        assert all(isinstance(value, float) for value in (before | after).values())
        assert {before[key] for key in METRICS} == {0.0}
        assert 0 < after["espresso/bytes_sent"] < after["espresso/bytes_raw"]
        assert after["espresso/residual_norm"] > 0
        assert after["espresso/measured_step_us"] > 0
        assert after["espresso/steps"] == steps
        assert after["espresso/tensors_compressed"] == 3, "a bias of 30 numbers travels raw"


def test_summary_says_what_is_done(played):
    for before, after, undecided in played(summaries):
        assert before.startswith("not started")
        assert undecided == [
            "not yet: automatic mode begins with the next step",
            "not yet: automatic mode measures plain steps, from step 37 on",
            "not yet: automatic mode waits for its kernels, which are compiled beside plain steps",
        ]
        names = [line.split()[0] for line in after.splitlines() if not line.startswith(" ")]
        assert names == ["job", "decided", "strategy", "sends", "keeps"]
        assert "4 tensors" in after
        assert "given: the strategy was given" in after
        assert "3 of 4 tensors are compressed, 99.8% of the elements" in after
        assert f"3 by efsignsgd: {SHARDED}" in after
        assert "times less" in after


def test_a_failed_exchange_raises_its_own_error(played):
    """DDP words it as a cast; ``state.errors()`` and the optimizer's step raise the original."""
    for raised in played(failing):
        assert raised["backward"].startswith("RuntimeError: Unable to cast")
        assert raised["step"] == raised["errors()"] == raised["state.error"]
        assert raised["step"].startswith("EspressoError: espresso on rank")
        assert raised["another optimizer"] == "nothing was raised"
        assert raised["errors() without one"] == "RuntimeError: of the user's own"
        assert raised["a loader"] == "RuntimeError: DataLoader timed out after 60 seconds"


def test_a_checkpoint_is_refused_before_anything_changes(played):
    for messages, unchanged in played(bad_checkpoints):
        assert unchanged
        for what, message in messages.items():
            assert message.startswith("CheckpointError: "), f"{what}: {message}"


def test_artifacts_that_cannot_be_written_are_a_warning(played):
    for rank, warnings in enumerate(played(unwritable)):
        said = ["artifacts_dir cannot be written to"] * (rank == 0) + ["the flight record cannot be written"]
        assert len(warnings) == len(said), warnings
        assert all(words in warning for words, warning in zip(said, warnings, strict=True)), warnings


def test_the_hook_obeys_ddps_rules():
    assert espresso_hook.__name__ == "espresso_hook"
    assert espresso_hook.__annotations__["bucket"] is dist.GradBucket
    assert list(espresso_hook.__annotations__)[:2] == ["state", "bucket"]


# -- scenarios, on two ranks -----------------------------------------------------------------------


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def frozen_once_wrapped() -> DistributedDataParallel:
    ddp = wrap(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)))
    ddp.module[0].requires_grad_(False)
    return ddp


def refusals(rank: int) -> dict[str, str]:
    small = mlp(20, 30, 3)
    ddp = wrap(small)
    good = strategy_for(ddp, Cluster(2, 1), ALLGATHER, "efsignsgd")
    folder = Path(tempfile.mkdtemp())

    def given(change: Callable[[dict[str, Any]], None]) -> Callable[[], Any]:
        body = good.to_json()
        change(body)
        path = folder / "strategy.json"

        def load() -> Any:
            path.write_text(json.dumps(body))
            return espresso.register(ddp, strategy=path, ranks_per_node=1)

        return load

    def with_strategy(strategy: Any) -> Callable[[], Any]:
        return lambda: espresso.register(ddp, strategy=strategy, ranks_per_node=1)

    (folder / "text.json").write_text("allreduce everything")
    other_shape = nn.Sequential(nn.Linear(20, 31), nn.Tanh(), nn.Linear(30, 3))
    cases: dict[str, Callable[[], Any]] = {
        "not DDP": lambda: espresso.register(nn.Linear(2, 2)),
        "unknown setting": lambda: espresso.register(ddp, colour="red"),
        "setting out of range": lambda: espresso.register(ddp, timeout_s=0),
        "registered twice": lambda: twice(),
        "unknown compressor": lambda: espresso.register(ddp, "zip"),
        "unknown parameter": lambda: espresso.register(ddp, "dgc:rate=0.1"),
        "malformed spec": lambda: espresso.register(ddp, "dgc:ratio"),
        "no such file": with_strategy(folder / "nowhere.json"),
        "not JSON": with_strategy(folder / "text.json"),
        "unknown key": given(lambda body: body.update(colour="red")),
        "unknown option": given(lambda body: body["tensors"][0].update(option="flat.telepathy")),
        "wrong fingerprint": given(lambda body: body.update(fingerprint="abc")),
        "missing tensor": with_strategy(
            strategy_for(nn.Sequential(*small[:2], nn.Linear(30, 3, bias=False)), Cluster(2, 1))
        ),
        "extra tensor": with_strategy(strategy_for(mlp(20, 30, 3, 3), Cluster(2, 1))),
        "other shape": with_strategy(strategy_for(other_shape, Cluster(2, 1))),
        "other cluster": with_strategy(strategy_for(ddp, Cluster(2, 2))),
        "hierarchical on one level": lambda: strategy_for(ddp, Cluster(2, 1), HIERARCHICAL),
        "sparse embedding": lambda: espresso.register(wrap(nn.Sequential(nn.Embedding(9, 4, sparse=True)))),
        "sparse, frozen once wrapped": lambda: espresso.register(frozen_once_wrapped()),
        "complex": lambda: espresso.register(wrap(nn.Sequential(nn.Linear(3, 3, dtype=torch.complex64)))),
        "meta": lambda: EspressoState().bind(nn.Linear(3, 3, device="meta")),
        "torch.compile": lambda: espresso_hook(EspressoState(), (torch.ones(3), nn.Parameter(torch.ones(3)))),
        "unbound": lambda: first_call(EspressoState()),
        "bound to another model": lambda: first_call(EspressoState().bind(mlp(20, 30, 3))),
        "uneven nodes": lambda: espresso.register(ddp, ranks_per_node=3),
        "scale": lambda: EspressoState().set_grad_scale(0.0),
    }
    return {what: message_of(action) for what, action in cases.items()}


def test_sparse_gradients_that_nobody_averages_are_none_of_ours() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModelError, match="module '0' makes sparse gradients"):
        named_gradients(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    assert list(named_gradients(model)) == ["1.weight", "1.bias"]
    frozen = nn.Sequential(nn.Embedding(9, 4, sparse=True).requires_grad_(False), nn.Linear(4, 2))
    assert list(named_gradients(frozen)) == ["1.weight", "1.bias"]


def test_names_are_the_same_whether_a_model_is_compiled_or_not():
    """Or a checkpoint and a strategy would be refused where ``torch.compile`` was switched on meanwhile."""
    inside = nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"), nn.Linear(3, 3))
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    for model in (inside, torch.compile(inside, backend="eager")):
        assert list(named_gradients(model)) == names
        bound = BoundModel.of(model)
        assert list(bound.parameters) == [tensor.name for tensor in bound.tensors] == names


def twice() -> None:
    """The second is refused before it starts anything."""
    ddp = wrap(mlp(20, 30, 3))
    with registered(ddp):
        before, groups = threading.active_count(), torch_groups._world.pg_map.copy()
        try:
            espresso.register(ddp, ranks_per_node=1)
        finally:
            assert threading.active_count() == before
            assert torch_groups._world.pg_map == groups


def first_call(state: EspressoState) -> None:
    ddp = wrap(mlp(20, 30, 3))
    ddp.register_comm_hook(state, espresso_hook)
    try:
        ddp(batch(0, 0, 20)).sum().backward()
    finally:
        state.close()


def disagreements(rank: int) -> dict[str, str]:
    messages = {}
    for what in ("compressor", "settings", "model", "strategy", "ranks_per_node", "build"):
        ddp = wrap(mlp(20, 30, 3))
        settings: dict[str, Any] = {"ranks_per_node": 1, "timeout_s": 15.0}
        if rank == 1:
            settings |= {
                "compressor": {"compressor": "topk:ratio=0.5"},
                "settings": {"seed": 5},
                "strategy": {"strategy": strategy_for(ddp, Cluster(2, 1), ALLGATHER, "efsignsgd")},
                "ranks_per_node": {"ranks_per_node": None},
                "model": {},
                "build": {},
            }[what]
        if what == "model":
            # DDP itself refuses other shapes; other names it does not see.
            ddp.module.add_module("2" if rank == 0 else "two", ddp.module._modules.pop("2"))
        version = espresso.__version__
        if what == "build" and rank == 1:
            espresso.__version__ += "+other"
        settings.setdefault("strategy", strategy_for(ddp, Cluster(2, 1)))
        messages[what] = message_of(lambda ddp=ddp, settings=settings: espresso.register(ddp, **settings))
        espresso.__version__ = version
    return messages


def late_binding(rank: int) -> list[bool]:
    equal = []
    wanted = None
    for order in ("register", "bind first", "hook first", "bind the wrapper"):
        module = mlp(20, 60, 30)
        if order == "register":
            ddp = wrap(module)
            with registered(ddp, SHARDED, "efsignsgd"):
                wanted = steps(ddp, rank)
            continue
        strategy = strategy_for(module, Cluster(2, 1), SHARDED, "efsignsgd")
        state = EspressoState("efsignsgd", strategy, ranks_per_node=1, timeout_s=15.0)
        if order == "bind first":
            state.bind(module)
        ddp = wrap(module)
        ddp.register_comm_hook(state, espresso_hook)
        if order != "bind first":
            state.bind(ddp if order == "bind the wrapper" else module)
        equal.append(steps(ddp, rank) == wanted)
        state.close()
    return equal


def steps(ddp: nn.Module, rank: int) -> list[str]:
    return train(ddp, range(4), lambda step: ddp(batch(rank, step, 20)).square().mean())


def from_file(rank: int) -> str:
    ddp = wrap(mlp(20, 60, 30))
    path = Path(tempfile.mkdtemp()) / "strategy.json"
    strategy_for(ddp, Cluster(2, 1), SHARDED, "efsignsgd").save(path)
    with registered(ddp, strategy=str(path)) as state:
        steps(ddp, rank)
        assert state.decided
        assert agreed(ddp)
        assert state.strategy is not None
        return str(state.strategy.choices["0.weight"].option)


def metrics(rank: int) -> tuple[dict[str, float], dict[str, float], int]:
    ddp = wrap(mlp(20, 300, 30))
    with registered(ddp, SHARDED, "efsignsgd") as state:
        before = state.metrics()
        steps(ddp, rank)
        return before, state.metrics(), 4


def summaries(rank: int) -> tuple[str, str, list[str]]:
    ddp, undecided = wrap(mlp(20, 300, 30)), []
    late = wrap(mlp(20, 300, 30))
    with registered(late, strategy="auto", compressor="powersgd:start_iter=40", profile_steps=3) as state:
        for is_compiled in (True, True, False):
            state.session.is_compiled = is_compiled
            undecided += [line[10:] for line in state.summary().splitlines() if line.startswith("decided")]
            steps(late, rank)
    with registered(ddp, SHARDED, "efsignsgd") as state:
        steps(ddp, rank)
        assert repr(state).startswith("<EspressoState: efsignsgd, strategy <Strategy: 4 tensors (efsignsgd)")
        return EspressoState().summary(), state.summary(), undecided


def failing(rank: int) -> dict[str, str]:
    ddp, other = wrap(mlp(20, 30, 3)), mlp(3, 3)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with registered(ddp, ALLGATHER, "efsignsgd") as state:
        steps(ddp, rank)
        codec: Any = state.session.codecs(state.compressor, Device.TRAINING)
        codec.encode = None  # not to be called

        def guarded(action: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> None:
                with state.errors():
                    action()

            return run

        def own() -> None:
            raise RuntimeError("of the user's own")

        def backward() -> None:
            ddp(batch(rank, 0, 20)).sum().backward()

        def loader() -> None:
            raise RuntimeError("DataLoader timed out after 60 seconds")

        raised = {"errors() without one": message_of(guarded(own)), "a loader": message_of(guarded(loader))}
        raised["backward"] = message_of(backward)
        raised |= {
            "step": message_of(optimizer.step),
            "errors()": message_of(guarded(backward)),
            "another optimizer": message_of(torch.optim.SGD(other.parameters(), lr=0.1).step),
            "state.error": f"EspressoError: {state.error}",
        }
        return raised


def bad_checkpoints(rank: int) -> tuple[dict[str, str], bool]:
    ddp = wrap(mlp(20, 300, 30))
    with registered(ddp, SHARDED, "efsignsgd") as state:
        steps(ddp, rank)
        state.set_epoch(3)
        good = copy.deepcopy(pickle.loads(pickle.dumps(state.state_dict())))
        before = kept(state)

        def loading(change: Callable[[dict[str, Any]], Any]) -> Callable[[], None]:
            body = {**good, "epoch": 7, "parts": dict(good["parts"])}
            change(body)
            return lambda: state.load_state_dict(body)

        def row(*values: Any) -> Callable[[], None]:
            """A checkpoint with this row in the first part."""
            message = torch.from_numpy(PLAIN.pack([tuple(values)]))
            return loading(lambda body: body["parts"].update({first: message}))

        first = next(iter(good["parts"]))
        ones, meta = np.ones(3, np.float32), torch.empty(3, dtype=torch.uint8, device="meta")
        strategy = json.loads(good["strategy"])
        strategy["tensors"] = strategy["tensors"][1:]
        cases = {
            "version is a tensor": loading(lambda body: body.update(version=torch.ones(2))),
            "kind is a list": loading(lambda body: body.update(kind=[])),
            "tensor is a list": row("residual", [], None, 0, ones),
            "site is a list": row("residual", "0.weight", [], 0, ones),
            "start is huge": row("residual", "0.weight", None, 2**62, ones),
            "a row that is a text": row("residual"),
            "a held nothing": row("nothing", "0.weight", None, 0, ones),
            "a part on meta": loading(lambda body: body["parts"].update({first: meta})),
            "a part that is a text": loading(lambda body: body["parts"].update({first: "a"})),
            "a part beyond the last": loading(lambda body: body["parts"].update({"840": body["parts"][first]})),
            "parts is a list": loading(lambda body: body.update(parts=[])),
            "bool as a step": loading(lambda body: body.update(step=True)),
            "cluster of no nodes": loading(lambda body: body.update(cluster=[0, 1])),
            "factors of nothing": loading(
                lambda body: body.update(factors=torch.from_numpy(PLAIN.pack([("factor", "nothing", None, 0, ones)])))
            ),
            "strategy is a number": loading(lambda body: body.update(strategy=3)),
            "strategy of another model": loading(lambda body: body.update(strategy=json.dumps(strategy))),
            "model is None": loading(lambda body: body.update(model=None)),
            "model is a number": loading(lambda body: body.update(model="3")),
        }
        messages = {what: message_of(action) for what, action in cases.items()}
        now = state.state_dict()
        return messages, kept(state) == before and all(now[key] == good[key] for key in ("step", "epoch", "strategy"))


def kept(state: EspressoState) -> list[tuple[str, int, bytes]]:
    rows = Checkpoint.parse(state.state_dict()).rows()
    return [(row.tensor, row.start, row.values.tobytes()) for row in rows]


def unwritable(rank: int) -> list[str]:
    """A file where the folder should be: also root cannot write there."""
    ddp = wrap(mlp(20, 60, 30))
    with (
        Said() as said,
        tempfile.NamedTemporaryFile() as file,
        registered(ddp, SHARDED, "efsignsgd", artifacts_dir=file.name),
    ):
        train(ddp, range(15), lambda step: ddp(batch(rank, step, 20)).square().mean())
    return said.warnings


@pytest.fixture(scope="module")
def played() -> Played:
    logging.getLogger("espresso").addHandler(logging.NullHandler())
    scenarios = (
        refusals, disagreements, late_binding, from_file, metrics, summaries, failing, bad_checkpoints, unwritable,
    )  # fmt: skip
    return Played(__name__, scenarios, 2)
