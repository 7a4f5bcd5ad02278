"""What ``mypy --strict`` says of a user's script: nothing of the right one, and what is wrong with the other.

``make types`` runs it, where an error that is expected and does not come is an error.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

import espresso


def right(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    state = espresso.register(model, "dgc:ratio=0.01", timeout_s=60, residual_dtype="bf16", artifacts_dir=None)
    with state.errors():
        model(torch.ones(1)).sum().backward()
        optimizer.step()
    adam = espresso.optim.CLAN(model, compressor=espresso.CompressorSpec("int8"), seed=3)
    strategy: espresso.Strategy = espresso.Strategy.uniform([espresso.TensorSpec("w", (3,))], espresso.Cluster(2, 1))
    try:
        state.use(strategy)
    except (espresso.EspressoError, espresso.StrategyError) as error:
        raise RuntimeError(f"{error}; {state.summary()}; {adam.exchange.error}") from error
    return state.metrics()


def wrong(model: DistributedDataParallel) -> None:
    espresso.register(model, timeout=60)  # type: ignore[call-arg]
    espresso.register(model, timeout_s="5")  # type: ignore[arg-type]
    espresso.register(model, compressor=None)  # type: ignore[arg-type]
