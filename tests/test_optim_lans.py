"""LANS against an independent float64 reference, and as torch.optim.Optimizer's conventions want it."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import espresso.optim
from espresso.optim import LANS

IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "one by one": {"foreach": False, "fused": False},
}
SIZES = (1, 7, 1023, 1024, 1025, 70_001)


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
def how(request):
    return request.param


def reference(x, gradients, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, bias_correction=True):
    """ALGORITHMS, section 2.2, in float64 and word for word; ``lr`` may be a list."""
    x = np.asarray(x, np.float64)
    m, v = np.zeros_like(x), np.zeros_like(x)
    norm = np.linalg.norm
    for t, g in enumerate(np.asarray(gradients, np.float64), start=1):
        unit = g / (norm(g) + eps) if norm(g) > 0 else g
        m = betas[0] * m + (1 - betas[0]) * unit
        v = betas[1] * v + (1 - betas[1]) * unit**2
        m_hat = m / (1 - betas[0] ** t) if bias_correction else m
        v_hat = v / (1 - betas[1] ** t) if bias_correction else v
        den = np.sqrt(v_hat) + eps
        r = m_hat / den + weight_decay * x
        c = unit / den + weight_decay * x
        trust_r = norm(x) / norm(r) if norm(x) > 0 and norm(r) > 0 else 1.0
        trust_c = norm(x) / norm(c) if norm(x) > 0 and norm(c) > 0 else 1.0
        rate = lr[t - 1] if isinstance(lr, list) else lr
        x = x - rate * (betas[0] * trust_r * r + (1 - betas[0]) * trust_c * c)
    return x


def drawn(size, steps=6, seed=0):
    """Start and gradients of very different sizes."""
    rng = np.random.default_rng(seed + size)
    return rng.normal(size=size), rng.normal(size=(steps, size)) * 10.0 ** rng.integers(-4, 5, (steps, 1))


def run(x, gradients, dtype=torch.float64, between=lambda optimizer: None, **settings):
    parameter = nn.Parameter(torch.tensor(x, dtype=dtype))
    optimizer = LANS([parameter], **settings)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=dtype)
        optimizer.step()
        between(optimizer)
    return parameter.detach()


def apart(got, want):
    """Largest difference, relative to the largest element."""
    return float(np.abs(got.double().numpy() - want).max() / np.abs(want).max())


# -- the formula -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_reference(how, size):
    x, gradients = drawn(size)
    for settings in (
        {},
        {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2},
        {"bias_correction": False, "weight_decay": 0.0},
    ):
        want = reference(x, gradients, **settings)
        assert apart(run(x, gradients, **settings, **how), want) < 1e-13
        assert apart(run(x, gradients, torch.float32, **settings, **how), want) < 3e-6


def test_is_neither_lamb_nor_a_gradient_blind_step(how):
    """The reference tells the terms apart: without either of them it is missed by far."""
    x, gradients = drawn(100)
    got = run(x, gradients, lr=0.05, **how)
    assert apart(got, reference(x, gradients, lr=0.05, betas=(0.85, 0.999))) > 1e-3
    assert apart(got, reference(x, gradients, lr=0.05, weight_decay=0.0)) > 1e-5


def test_the_size_of_gradients_does_not_matter(how):
    x, gradients = drawn(500)
    first = run(x, gradients, eps=0.0, **how)
    other = run(x, gradients * 2.0**12, eps=0.0, **how)
    assert torch.equal(first, other)
    assert not torch.equal(first, torch.tensor(x))


def test_zero_gradients_zero_parameters_and_empty_ones(how):
    x, gradients = drawn(40)
    mixed = np.stack([np.zeros(40), gradients[0], np.zeros(40)])
    assert apart(run(x, mixed, **how), reference(x, mixed)) < 1e-13
    assert apart(run(np.zeros(40), gradients, **how), reference(np.zeros(40), gradients)) < 1e-13
    assert run(np.zeros(0), np.zeros((2, 0)), **how).numel() == 0
    assert run(np.zeros(()), np.ones((2,)), **how) < 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_keep_moments_in_float32(how, dtype):
    if how.get("fused"):
        with pytest.raises(RuntimeError, match="fused=True needs parameters of float32 or float64"):
            LANS([nn.Parameter(torch.zeros(3, dtype=dtype))], fused=True)
        return
    x, gradients = drawn(1000)
    gradients = np.clip(gradients, -1e3, 1e3)
    got = run(x, gradients, dtype, lr=0.05, **how)
    assert got.dtype is dtype
    assert apart(got, reference(x, gradients, lr=0.05)) < (5e-3 if dtype is torch.float16 else 4e-2)
    parameter = nn.Parameter(torch.tensor(x, dtype=dtype))
    optimizer = LANS([parameter], **how)
    parameter.grad = torch.tensor(gradients[0], dtype=dtype)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg_sq"].dtype is torch.float32
    fresh = LANS([parameter], **how)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(fresh.state[parameter][name], optimizer.state[parameter][name])
        assert fresh.state[parameter][name].dtype is torch.float32


def test_layouts(how):
    """Transposed, channels-last and sliced parameters step as contiguous ones do."""
    images = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    for make in (
        lambda: images.clone().to(memory_format=torch.channels_last),
        lambda: images.clone().transpose(0, 3),
        lambda: torch.stack([images, images])[0],
        lambda: images.repeat(1, 1, 1, 2)[..., ::2],
    ):
        parameter = nn.Parameter(make())
        plain = nn.Parameter(parameter.detach().contiguous())
        settings = how if parameter.is_contiguous() else {**how, "fused": None} if how.get("fused") else how
        pair = [(parameter, LANS([parameter], lr=0.1, **settings)), (plain, LANS([plain], lr=0.1, **how))]
        gradient = torch.randn_like(plain)
        for each, optimizer in pair:
            each.grad = gradient.clone()
            optimizer.step()
        torch.testing.assert_close(parameter.detach(), plain.detach(), rtol=1e-12, atol=1e-12)


def test_the_memory_format_may_change_between_steps(how):
    """A checkpoint's moments, or a model's own, lie otherwise than its parameters then."""
    start, gradients = torch.randn(3, 4, 5, 6), torch.randn(4, 3, 4, 5, 6)
    parameters = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [LANS([parameter], lr=0.1, **how) for parameter in parameters]
    for step, gradient in enumerate(gradients):
        if step == 2:
            parameters[1].data = parameters[1].data.to(memory_format=torch.channels_last)
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(parameters[1].detach(), parameters[0].detach(), rtol=1e-5, atol=1e-6)


def test_a_step_between_forward_and_backward_is_noticed(how):
    parameter = nn.Parameter(torch.ones(5))
    loss = (parameter**2).sum()
    parameter.grad = torch.ones(5)
    LANS([parameter], **how).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_squares_beyond_float32_do_not_matter(how):
    x, gradients = drawn(1000)
    got = run(x * 1e20, gradients * 1e16, torch.float32, lr=0.1, **how)
    assert apart(got, reference(x * 1e20, gradients * 1e16, lr=0.1)) < 1e-5


def test_steps_are_counted_whatever_the_default_type(how):
    torch.set_default_dtype(torch.bfloat16)
    try:
        parameter = nn.Parameter(torch.ones(5, dtype=torch.float32))
        optimizer = LANS([parameter], **how)
        for _ in range(258):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert int(optimizer.state[parameter]["step"]) == 258


def test_fused_does_not_depend_on_the_number_of_threads():
    x, gradients = drawn(300_001, steps=2)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            results.append(run(x, gradients, torch.float32, lr=0.01, fused=True))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# -- an ordinary optimizer -------------------------------------------------------------------------


def test_defaults_and_implementations():
    fused = LANS([nn.Parameter(torch.zeros(2))])
    assert fused.defaults["lr"] == 1e-3
    assert (fused.defaults["betas"], fused.defaults["eps"]) == ((0.9, 0.999), 1e-6)
    assert (fused.defaults["weight_decay"], fused.defaults["bias_correction"]) == (0.01, True)
    x, gradients = drawn(2000)
    automatic = run(x, gradients, torch.float32)
    assert torch.equal(automatic, run(x, gradients, torch.float32, fused=True))
    assert not torch.equal(automatic, run(x, gradients, torch.float32, foreach=True))  # rounding differs
    assert espresso.optim.LANS is LANS


def test_maximize(how):
    x, gradients = drawn(50)
    up = run(x, gradients, lr=0.05, maximize=True, **how)
    assert torch.equal(up, run(x, -gradients, lr=0.05, **how))


def test_groups_schedulers_and_parameters_without_gradient(how):
    (x, gradients), (y, others) = drawn(30), drawn(31)
    first, second = nn.Parameter(torch.tensor(x)), nn.Parameter(torch.tensor(y))
    idle = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = LANS([{"params": [("a", first)], "lr": 0.1}, {"params": [("b", idle)]}], lr=0.02, **how)
    optimizer.add_param_group({"params": [("c", second)], "weight_decay": 0.5, "betas": (0.5, 0.9)})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 1.0, 0.5, 0.25, 0.0, 2.0][step % 6])
    factors = []
    for g, h in zip(gradients, others, strict=True):
        first.grad, second.grad = torch.tensor(g), torch.tensor(h)
        factors.append(optimizer.param_groups[0]["lr"] / 0.1)
        optimizer.step()
        schedule.step()
    assert factors == [0.0, 1.0, 0.5, 0.25, 0.0, 2.0]
    want = reference(x, gradients, lr=[0.1 * factor for factor in factors])
    assert apart(first.detach(), want) < 1e-13
    want = reference(y, others, lr=[0.02 * factor for factor in factors], weight_decay=0.5, betas=(0.5, 0.9))
    assert apart(second.detach(), want) < 1e-13
    assert torch.equal(idle.detach(), torch.ones(3, dtype=torch.float64))
    assert idle not in optimizer.state


def test_closure_and_a_rate_that_is_a_tensor(how):
    parameter = nn.Parameter(torch.full((4,), 3.0))
    optimizer = LANS([parameter], lr=torch.tensor(0.1), **how)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert calls == [True] * 5
    assert losses[0] == 36.0
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_resumed_is_bit_identical(dtype, tmp_path):
    x, gradients = drawn(3000, steps=8)

    def trained(broken):
        parameter = nn.Parameter(torch.tensor(x, dtype=dtype))
        optimizer = LANS([parameter], lr=0.05)
        for step, gradient in enumerate(gradients):
            if broken and step == 4:
                torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
                optimizer = LANS([parameter], lr=0.7)
                optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
            parameter.grad = torch.tensor(gradient, dtype=dtype)
            optimizer.step()
        return parameter.detach()

    assert torch.equal(trained(broken=False), trained(broken=True))


def test_copies_and_pickles():
    parameter = nn.Parameter(torch.ones(5))
    optimizer = LANS([parameter], lr=0.1)
    parameter.grad = torch.arange(5.0)
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (its,) = twin.param_groups[0]["params"]
        its.grad = torch.arange(5.0)
        twin.step()
        assert twin.state[its]["step"] == 2
        assert optimizer.state[parameter]["step"] == 1


def test_gradients_are_not_touched(how):
    parameter = nn.Parameter(torch.ones(5))
    parameter.grad = torch.arange(5.0)
    LANS([parameter], **how).step()
    assert torch.equal(parameter.grad, torch.arange(5.0))


def test_nan_is_not_hidden(how):
    assert run(np.ones(3), [[1.0, np.nan, 2.0]], **how).isnan().all()


def test_refusals():
    parameter = nn.Parameter(torch.ones(3))
    for settings, text in (
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"eps": -1e-9}, "eps must be at least 0"),
        ({"weight_decay": float("nan")}, "weight_decay must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers .* got \(0.9, 1.0\)"),
    ):
        with pytest.raises(ValueError, match=text):
            LANS([parameter], **settings)
        optimizer = LANS([nn.Parameter(torch.ones(2))])
        with pytest.raises(ValueError, match=text):
            optimizer.add_param_group({"params": [parameter], **settings})
        assert len(optimizer.param_groups) == 1
    with pytest.raises(RuntimeError, match="cannot both be true"):
        LANS([parameter], foreach=True, fused=True)
    with pytest.raises(TypeError, match=r"'w' is torch.complex64; .*view_as_real"):
        LANS([("w", nn.Parameter(torch.ones(2, dtype=torch.complex64)))])
    with pytest.raises(TypeError, match=r"shape \[2\] is torch.int64"):
        LANS([nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)])


def test_sparse_gradients_are_refused_by_name(how):
    table = nn.Embedding(5, 2, sparse=True)
    weight = table.weight.detach().clone()
    optimizer = LANS(table.named_parameters(), **how)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not take sparse gradients, and parameter 'weight' has one"):
        optimizer.step()
    assert torch.equal(table.weight.detach(), weight)
