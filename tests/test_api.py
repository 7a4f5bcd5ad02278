"""The front door: what is exported, how it is shown, and what settings may be."""

import inspect
import re
import tomllib
import typing
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import espresso
from espresso.live.config import RANGES, Config, Settings
from espresso.live.given import Given
from espresso.strategies import Strategy


def test_the_door_shows_the_api_alone():
    assert dir(espresso) == sorted(espresso.__all__)
    assert all(getattr(espresso, name) is not None for name in espresso.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'Registre'; it has .*register"):
        espresso.Registre  # noqa: B018


def test_types_are_checked_strictly():
    """Of ``users_script.py`` too: an expected error that does not come is one only then."""
    root = Path(__file__).parents[1]
    assert tomllib.loads((root / "pyproject.toml").read_text())["tool"]["mypy"]["strict"] is True
    assert " -m tests.users_script\n" in (root / "Makefile").read_text()


def test_settings_have_one_list_each_of_types_and_ranges():
    assert typing.get_type_hints(Settings) == typing.get_type_hints(Config)
    assert list(RANGES) == [field.name for field in fields(Config)]
    told = inspect.getdoc(Config)
    assert told is not None
    assert all(f"\n    {name}: " in told for name in RANGES)


@pytest.mark.parametrize(
    ("name", "value", "error", "wanted"),
    [
        ("race_steps", 3.5, TypeError, "a whole number from 3 to 10000"),
        ("race_steps", 2, ValueError, "a whole number from 3 to 10000"),
        ("race_steps", True, TypeError, "a whole number from 3 to 10000"),
        ("check_every", 0.5, TypeError, "a whole number from 0 to 1000000000"),
        ("profile_steps", 1e9, TypeError, "a whole number from 1 to 10000"),
        ("profile_steps", 10**9, ValueError, "a whole number from 1 to 10000"),
        ("seed", "a", TypeError, "a whole number from 0 to 9223372036854775807"),
        ("seed", -1, ValueError, "a whole number from 0 to"),
        ("timeout_s", float("inf"), ValueError, "a number above 0 and up to 1e+06"),
        ("timeout_s", float("nan"), ValueError, "a number above 0 and up to 1e+06"),
        ("timeout_s", "5", TypeError, "a number above 0 and up to 1e+06"),
        ("timeout_s", True, TypeError, "a number above 0 and up to 1e+06"),
        ("timeout_s", None, TypeError, "a number above 0 and up to 1e+06"),
        ("feedback_gain", 1.5, ValueError, "a number above 0 and up to 1 or None"),
        ("feedback_gain", 0, ValueError, "a number above 0 and up to 1 or None"),
        ("error_budget", -1, ValueError, "a number from 0 to 1e+06 or None"),
        ("keep_exact", "bias", TypeError, "a list of texts"),
        ("force", ["fp16"], TypeError, "a dictionary of texts"),
        ("force", {0: "fp16"}, ValueError, "a dictionary of texts"),
        ("force", {"*.weight": None}, ValueError, "a dictionary of texts"),
        ("transactional", 1, TypeError, "True or False"),
        ("residual_dtype", "int7", ValueError, "one of float32, bf16, int8"),
        ("residual_dtype", 8, TypeError, "one of float32, bf16, int8"),
        ("offload_threads", 0, ValueError, "a whole number from 1 to 1024 or None"),
        ("ranks_per_node", 1.0, TypeError, "a whole number from 1 to 65536 or None"),
        ("artifacts_dir", 3, TypeError, "a path or None"),
    ],
)
def test_a_wrong_setting_names_itself_its_value_and_its_range(name, value, error, wanted):
    with pytest.raises(error) as caught:
        Config(**{name: value})
    assert str(caught.value).startswith(f"{name} must be {wanted}")
    assert f"got {value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        ("ESPRESSO_TIMEOUT_S", "-5", "a number above 0 and up to 1e+06"),
        ("ESPRESSO_TIMEOUT_S", "5min", "a number above 0 and up to 1e+06"),
        ("ESPRESSO_RANKS_PER_NODE", "0", "a whole number from 1 to 65536"),
        ("ESPRESSO_RANKS_PER_NODE", "two", "a whole number from 1 to 65536"),
    ],
)
def test_a_wrong_variable_names_itself_its_value_and_its_range(variable, value, wanted, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=re.escape(f"{variable} must be {wanted}, got {value!r}")):
        Config.from_keywords({"timeout_s": 20.0})


def test_what_is_misspelt_has_a_suggestion():
    with pytest.raises(TypeError, match="no setting 'timeout'; did you mean 'timeout_s'"):
        espresso.EspressoState(timeout=3)
    with pytest.raises(ValueError, match="strategy='atuo' is no file; did you mean 'auto'"):
        espresso.EspressoState(strategy="atuo")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": None}, "strategy must be 'auto', a path, a Strategy, or a function .* got None"),
        ({"strategy": 3}, r"strategy must be .* got 3 \(int\)"),
        ({"compressor": None}, "compressor must be a text such as 'dgc:ratio=0.01' or a CompressorSpec, got None"),
        ({"grad_scaler": 3.0}, "grad_scaler must have a get_scale"),
    ],
)
def test_what_is_no_strategy_or_compressor_is_a_type_error(given, said):
    with pytest.raises(TypeError, match=said):
        espresso.EspressoState(**given)


def test_a_function_must_return_a_strategy():
    given = Given.of("efsignsgd", lambda tensors, cluster: None)
    with pytest.raises(TypeError, match="must return a Strategy, got None"):
        given.on((), espresso.Cluster(2, 1))


def test_one_process_without_ddp_runs_as_it_is(tmp_path):
    model = torch.nn.Linear(3, 2)
    with espresso.register(model, "dgc:ratio=0.01", grad_scaler=None, timeout_s=60) as state:
        assert repr(state) == "<EspressoState: dgc:ratio=0.01, strategy auto; off (one process without DDP)>"
        with state.errors():
            model(torch.ones(1, 3)).sum().backward()
        for act in (state.start, state.flush, state.check_replicas, state.unregister, state.summary, state.metrics):
            act()
        assert state.rank == 0
        assert state.decided
        torch.save(state.state_dict(), tmp_path / "state.pt")
        assert state.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)) == ()
        assert list(state.gather_state_dict()["parts"]) == list(map(str, range(840)))
    with pytest.raises(TypeError, match="no setting 'colour'"):
        espresso.register(model, colour="red")


def test_everything_shows_itself_in_a_line():
    state = espresso.EspressoState("dgc:ratio=0.01", timeout_s=20)
    assert repr(state) == "<EspressoState: dgc:ratio=0.01, strategy auto; not started>"
    assert repr(state.config) == "Config(timeout_s=20)"
    assert state.summary().startswith("not started")
    tensors = [espresso.TensorSpec(f"layer {n}", (10, 10)) for n in range(100)]
    strategy = Strategy.uniform(tensors, espresso.Cluster(2, 2))
    assert repr(strategy) == "<Strategy: 100 tensors (none), on 2 nodes x 2 ranks>"
