"""The suite: the tasks that it makes itself, in their tiny forms on two ranks; the GAN, two models, also compressed."""

import os

import pytest
import torch

from benchmarks.suite.__main__ import in_band, rows_of
from benchmarks.suite.tasks import MADE, NAMES, build_task
from tests.workers import run_ranks

ARMS = "none,barrier,plain,espresso:efsignsgd"


def _all_tasks(rank: int) -> dict[str, object]:
    from benchmarks.arms import parse_arms
    from benchmarks.suite.worker import time_arms, train_to_end
    from benchmarks.train import Place

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place, arms = Place.from_env(None), parse_arms(ARMS)
    rows = time_arms(build_task("gan", tiny=True), arms, place, 2, 2, 0)
    for name in MADE.keys() - {"gan"}:
        rows += time_arms(build_task(name, tiny=True), arms[:3], place, 2, 2, 0)
    end = train_to_end(build_task("gan", tiny=True), arms[3], place, 4)
    return {"rows": rows, "end": end}


@pytest.fixture(scope="module")
def found():
    return run_ranks(_all_tasks, 2)[0].value


def test_replicas_stay_equal_where_they_should_and_drift_where_nothing_is_sent(found):
    equal = {(row["task"], row["arm"]): row["replicas_equal"] for row in found["rows"]}
    of_all = {(name, arm) for name in MADE for arm in ("none", "barrier", "plain")}
    assert set(equal) == of_all | {("gan", "espresso:efsignsgd")}
    for (_, arm), same in equal.items():
        assert same is (None if arm in ("none", "barrier") else True)
    assert found["end"]["replicas_equal"] is True


def test_plain_sends_its_gradients(found):
    # (Only from below: on loopback the counter sees what others send too.)
    for row in found["rows"]:
        if row["arm"] == "plain":
            assert row["mb_per_step_per_host"] > 0.8 * 4e-6 * row["parameters"]


def test_memory_and_metric_are_there(found):
    assert 50 < found["end"]["peak_mib"] < 4000
    assert found["end"]["metric"] > 0


def test_rows_have_both_bounds_and_an_overlap_only_on_a_limited_network(found):
    timed = [row for row in found["rows"] if row["task"] == "gan"]
    rows = rows_of(timed, "1gbit", 1e9)
    assert rows[0]["of_compute"] == pytest.approx(1.0)
    assert rows[1]["of_barrier"] == pytest.approx(1.0)
    assert [row["overlap"] is None for row in rows] == [True, True, False, False]
    assert all(row["overlap"] is None for row in rows_of(timed, "none", None))


def test_the_band_is_the_worst_of_plains_seeds_either_way_round():
    assert in_band([0.9, 0.8], [0.8, 0.9], less_is_more=False)
    assert not in_band([0.9, 0.6], [0.8, 0.9], less_is_more=False)
    assert in_band([1.0, 1.2], [1.0, 1.1], less_is_more=True)
    assert not in_band([1.2, 1.2], [1.0, 1.1], less_is_more=True)


@pytest.mark.parametrize("name", list(MADE))
def test_a_task_that_the_suite_makes_is_learnt(name):
    """On one rank, without DDP: the metric after a hundred steps is better than before."""
    task = build_task(name, seed=1, tiny=True)

    class Alone(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *inputs):
            return self.module(*inputs)

    torch.set_num_threads(1)
    bare = task.make_models()
    models = [Alone(model) for model in bare]
    optimizers = [task.make_optimizer(model) for model in bare]
    before = task.metric(bare)
    for step in range(100):
        task.step(models, optimizers, step, 0, 1)
    after = task.metric(bare)
    assert after < 0.8 * before if task.less_is_more else after > before + 0.05


def test_eight_structures_and_the_same_weights_for_a_seed():
    assert len(NAMES) >= 8
    one, other = (build_task("graph", 3, tiny=True).make_models()[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="no tiny task is called 'gpt'"):
        build_task("gpt", tiny=True)
