"""Models of 85 k to 200 k parameters with optimizers, for trainings that are run many times: "mlp-sgd" and so on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.models import Gpt


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _gpt() -> nn.Module:
    return Gpt(width=64, num_layers=2, num_heads=4)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": _mlp, "cnn": _cnn, "gpt": _gpt}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01),
    "sgd0": lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
    "adam5": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9)),
    "adam0": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.99)),
}
