"""Tasks that were made when every constant stood. Then all that were trained ended outside, and gains were set anew.

| name        | what is different                       | data                             | metric              |
| ----------- | --------------------------------------- | -------------------------------- | ------------------- |
| autoencoder | a narrow middle, targets are images     | 8x8 digits, half of each hidden  | error, less is more |
| mixer       | dense over places and over channels     | 8x8 digits                       | accuracy            |
| translate   | two recurrent halves, attention between | words by a rule                  | accuracy            |
| waves       | dilated convolutions over a long row    | waves of eight kinds under noise | accuracy            |
| sets        | the same network at every point, a mean | points of eight shapes           | accuracy            |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models import digits, seeded
from benchmarks.suite.task import TEST, Optimizers, Task, classifier, descend, generator_of

# Half of an image's pixels are hidden; all of them are asked for.


def _autoencoder(seed: int, tiny: bool) -> Task:
    width, middle = (32, 8) if tiny else (1200, 24)
    (images, _), (test, _) = digits()

    def make() -> list[nn.Module]:
        sizes = [64, width, width, middle, width, width, 64]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.GELU()]
        return [nn.Sequential(*layers[:-1])]

    def error(model: nn.Module, whole: Tensor, generator: torch.Generator) -> Tensor:
        seen = whole * (torch.rand(whole.shape, generator=generator) < 0.5)
        return functional.mse_loss(model(seen), whole)

    def step(models: Sequence[nn.Module], optimizers: Optimizers, step: int, rank: int, world: int) -> float:
        drawn = generator_of(seed, step, rank)
        whole = images[torch.randint(len(images), (64,), generator=drawn)]
        return descend(optimizers[0], error(models[0], whole, drawn))

    @torch.no_grad()
    def metric(models: Sequence[nn.Module]) -> float:
        return float(error(models[0], test, generator_of(0, TEST)))

    return Task(
        "autoencoder", seeded(seed, make), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), step, metric,
        less_is_more=True,
    )  # fmt: skip


# Of the digits' 8x8 pixels, sixteen patches of four: dense layers over the patches, then over what each holds.


class MixerLayer(nn.Module):
    """One dense network over places and one over channels, each added to what comes in."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(places, 4 * places), nn.GELU(), nn.Linear(4 * places, places))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, held: Tensor) -> Tensor:
        """(batch, places, width) to the same."""
        held = held + self.places(self.before(held).transpose(1, 2)).transpose(1, 2)
        return torch.as_tensor(held + self.channels(self.between(held)))


class Mixer(nn.Module):
    """Patches through layers, then the mean of all places."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.layers = nn.Sequential(*(MixerLayer(16, width) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 64) to logits (batch, 10)."""
        patches = images.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        return torch.as_tensor(self.head(self.layers(self.first(patches)).mean(1)))


def digits_batch(generator: torch.Generator, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """So many digits; of the test if more are asked for than it has, as the metric does."""
    train, test = digits()
    images, labels = test if size > len(test[0]) else train
    drawn = torch.randint(len(images), (size,), generator=generator)
    return (images[drawn],), labels[drawn]


def _mixer(seed: int, tiny: bool) -> Task:
    return classifier(
        "mixer", seed, lambda: Mixer(16, 2) if tiny else Mixer(320, 5), digits_batch, 8 if tiny else 24,
        3e-3 if tiny else 5e-4,
    )  # fmt: skip


# A word is to be written backwards, each letter moved on by the letter that comes before it in the word.


class Translator(nn.Module):
    """A recurrent half that reads, one that writes, and attention from what is written to what was read."""

    def __init__(self, width: int, letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters + 1, width)
        self.reads, self.writes = nn.GRU(width, width, batch_first=True), nn.GRU(width, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(2 * width, letters)

    def forward(self, word: Tensor, written: Tensor) -> Tensor:
        """(batch, length) twice, the second one place late, to logits (batch, letters, length)."""
        read, last = self.reads(self.letters(word))
        held, _ = self.writes(self.letters(written), last)
        seen, _ = self.attention(held, read, read, need_weights=False)
        return torch.as_tensor(self.head(torch.cat([held, seen], 2)).transpose(1, 2))


def _translate(seed: int, tiny: bool) -> Task:
    letters, length, width = (4, 4, 32) if tiny else (24, 12, 512)

    def batch(generator: torch.Generator, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
        word = torch.randint(letters, (size, length), generator=generator)
        target = ((word + word.roll(1, 1)) % letters).flip(1)
        late = torch.cat([torch.full((size, 1), letters), target[:, :-1]], 1)
        return (word, late), target

    return classifier(
        "translate", seed, lambda: Translator(width, letters), batch, 8 if tiny else 32, 2e-2 if tiny else 1e-3
    )


# A row of 256 numbers: two sines whose pitches have one of eight relations, with phases and noise at random.


class Waves(nn.Module):
    """Convolutions that look twice as far in each layer, and the mean over the row."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 5, padding=2)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, width, 3, padding=2**depth, dilation=2**depth) for depth in range(layers)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, row: Tensor) -> Tensor:
        """(batch, length) to logits (batch, 8)."""
        held = self.first(row[:, None])
        for layer, norm in zip(self.layers, self.norms, strict=True):
            held = held + functional.relu(norm(layer(held)))
        return torch.as_tensor(self.head(held.mean(2)))


def _waves(seed: int, tiny: bool) -> Task:
    length = 64 if tiny else 256

    def batch(generator: torch.Generator, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
        kinds = torch.randint(8, (size,), generator=generator)
        shift, one, two = torch.rand(3, size, 1, generator=generator)
        pitch, at = 0.1 + 0.05 * shift, torch.arange(length)
        high = pitch * (1.5 + kinds[:, None])
        row = torch.sin(pitch * at + 6.3 * one) + torch.sin(high * at + 6.3 * two)
        return (row + 0.3 * torch.randn(size, length, generator=generator),), kinds

    return classifier("waves", seed, lambda: Waves(16, 3) if tiny else Waves(320, 6), batch, 4, 5e-3 if tiny else 1e-3)


# Points of the plane on one of eight outlines, one in ten anywhere.

POINTS = 48


class Sets(nn.Module):
    """A network at every point, the mean and the largest of what it says, and a network over both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.all = nn.Sequential(
            nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 8)
        )

    def forward(self, points: Tensor) -> Tensor:
        """(batch, points, 2) to logits (batch, 8)."""
        said = self.points(points)
        return torch.as_tensor(self.all(torch.cat([said.mean(1), said.amax(1)], 1)))


def _sets(seed: int, tiny: bool) -> Task:
    def batch(generator: torch.Generator, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
        kinds = torch.randint(8, (size,), generator=generator)
        angle = 2 * torch.pi * torch.rand(size, POINTS, generator=generator)
        # Leaves: none is a circle; the odd kinds are hollowed by half as much as the even ones.
        leaves, depth = (kinds // 2 + 1)[:, None], torch.where(kinds % 2 == 0, 0.5, 0.25)[:, None]
        radius = 1 - depth * torch.cos(leaves * angle)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], 2)
        anywhere = torch.rand(size, POINTS, 1, generator=generator) < 0.1
        return (torch.where(anywhere, torch.randn(points.shape, generator=generator), points),), kinds

    return classifier("sets", seed, lambda: Sets(24 if tiny else 900), batch, 16, 5e-3 if tiny else 5e-4)


HELD_OUT: dict[str, Callable[[int, bool], Task]] = {
    "autoencoder": _autoencoder,
    "mixer": _mixer,
    "translate": _translate,
    "waves": _waves,
    "sets": _sets,
}
