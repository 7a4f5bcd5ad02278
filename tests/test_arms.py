"""The benchmarks' own tools: arms, ratios, models."""

import math

import numpy as np
import pytest
import torch

from benchmarks.arms import Arm, parse_arms
from benchmarks.models import NAMES, build_workload, num_parameters
from benchmarks.ratios import paired_ratio


def test_arms_are_split_at_the_right_commas() -> None:
    arms = parse_arms("none,plain,espresso:dgc:ratio=0.01,momentum=0.9,powersgd:rank=2,espresso:int8@a/b.json")
    assert [(arm.kind, arm.detail) for arm in arms] == [
        ("none", ""),
        ("plain", ""),
        ("espresso", "dgc:ratio=0.01,momentum=0.9"),
        ("powersgd", "rank=2"),
        ("espresso", "int8@a/b.json"),
    ]
    assert ",".join(arm.name for arm in arms).count("momentum") == 1


@pytest.mark.parametrize("wrong", ["", "ddp", "espresso", "powersgd:2x", "plain,plain"])
def test_wrong_arms_are_named(wrong: str) -> None:
    with pytest.raises(ValueError, match="arm"):
        parse_arms(wrong)


def test_only_the_arm_without_communication_lets_replicas_drift() -> None:
    assert not Arm("none", "none").keeps_replicas_equal
    assert Arm("plain", "plain").keeps_replicas_equal


def test_paired_ratio_cancels_what_both_feel() -> None:
    reference = [1.0, 5.0, 2.0, 9.0]
    ratio = paired_ratio([2.0 * time for time in reference], reference)
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low == pytest.approx(2.0)
    assert ratio.high == pytest.approx(2.0)


def test_an_outlier_hardly_moves_the_ratio_of_many_pairs() -> None:
    times = [1.01 + 0.001 * (i % 5) for i in range(40)]
    times[7] = 30.0
    ratio = paired_ratio(times, [1.0] * 40)
    assert ratio.value == pytest.approx(1.012, abs=0.001)
    assert 1.010 < ratio.low < ratio.value < ratio.high < 1.015


def test_wilcoxons_interval_covers_as_often_as_it_says() -> None:
    random = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        ratio = paired_ratio(np.exp(0.1 * random.standard_t(2, 30)).tolist(), [1.0] * 30)
        hits += ratio.low <= 1.0 <= ratio.high
    assert 0.92 <= hits / 400 <= 0.98


def test_paired_ratio_interval_by_hand() -> None:
    # Logarithms -1, 0, 1: mean 0, standard error 1/sqrt(3), t(0.975, 2) = 4.302653.
    ratio = paired_ratio([math.exp(-1), 1.0, math.e], [1.0, 1.0, 1.0])
    half = 4.302653 / math.sqrt(3)
    assert ratio.value == pytest.approx(1.0)
    assert math.log(ratio.high) == pytest.approx(half, rel=1e-5)
    assert math.log(ratio.low) == pytest.approx(-half, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "least"),
    [("mlp", 10e6), ("gpt", 10e6), ("cnn", 2e6), ("resnet", 8e6), ("vit", 8e6), ("lstm", 8e6)],
)
def test_workloads_are_real_and_repeatable(name: str, least: float) -> None:
    assert name in NAMES
    workload = build_workload(name, seed=3)
    model, twin = workload.make_model(), build_workload(name, seed=3).make_model()
    assert num_parameters(model) >= least
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    other = build_workload(name, seed=4).make_model()
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    inputs, targets = workload.batch(7, 0, 2)
    again = workload.batch(7, 0, 2)
    assert torch.equal(inputs, again[0])
    assert torch.equal(targets, again[1])
    assert not torch.equal(inputs, workload.batch(7, 1, 2)[0])
    assert not torch.equal(inputs, workload.batch(8, 0, 2)[0])


def test_training_learns_on_data_that_it_is_not_tested_on() -> None:
    torch.manual_seed(0)
    workload = build_workload("cnn")
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    before = workload.evaluate(model)
    for step in range(20):
        inputs, targets = workload.batch(step, 0, 1)
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
    after = workload.evaluate(model)
    assert after.loss < before.loss
    assert after.accuracy > 0.5
    seen = {tuple(row.tolist()) for row in workload.batch(0, 0, 1)[0]}
    tested = {tuple(row.tolist()) for row in workload.test_batches()[0][0]}
    assert not seen & tested


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ValueError, match="'alexnet'"):
        build_workload("alexnet")
