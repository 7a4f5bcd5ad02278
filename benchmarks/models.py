"""Real models on real data with nothing to download: digits ship with scikit-learn, text with Python itself.

| name | parameters | data                                   | metric                     |
| ---- | ---------- | -------------------------------------- | -------------------------- |
| mlp  | 10.2 M     | 8x8 digits                             | test accuracy              |
| cnn  | 2.5 M      | 8x8 digits                             | test accuracy              |
| gpt  | 10.7 M     | the standard library's source, by char | next-character accuracy    |

Nothing here was tuned by these; they are for judging what was:

| name   | parameters | data                                   | metric                  |
| ------ | ---------- | -------------------------------------- | ----------------------- |
| resnet | 9.8 M      | 8x8 digits                             | test accuracy           |
| vit    | 8.9 M      | 8x8 digits, in patches of 2x2          | test accuracy           |
| lstm   | 8.8 M      | the standard library's source, by char | next-character accuracy |

Everything is seeded: the same name, seed, step, rank and world size give the same weights and batches.
"""

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar, get_args

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

Name = Literal["mlp", "gpt", "cnn", "resnet", "vit", "lstm"]
NAMES: tuple[str, ...] = get_args(Name)

Made = TypeVar("Made")
Batch = tuple[Tensor, Tensor]
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Evaluation:
    """Test loss (mean cross entropy, nats) and accuracy."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Workload:
    """A model with its data, optimizer and test.

    ``batch(step, rank, world_size)`` returns inputs and targets of that rank's share of the step's batch.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_optimizer: Optimizer
    batch: Callable[[int, int, int], Batch]
    test_batches: Callable[[], list[Batch]]

    def on(self, device: str) -> "Workload":
        """The same, with model and data on a device."""

        def moved(batch: Batch) -> Batch:
            return batch[0].to(device), batch[1].to(device)

        return replace(
            self,
            make_model=lambda: self.make_model().to(device),
            batch=lambda step, rank, world_size: moved(self.batch(step, rank, world_size)),
            test_batches=lambda: [moved(batch) for batch in self.test_batches()],
        )

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy over all leading dimensions."""
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Evaluation:
        """Loss and accuracy on data that training never sees."""
        was_training = model.training
        model.eval()
        loss, right, count = 0.0, 0, 0
        for inputs, targets in self.test_batches():
            outputs = model(inputs)
            loss += float(self.loss(outputs, targets)) * targets.numel()
            right += int((outputs.argmax(-1) == targets).sum())
            count += targets.numel()
        model.train(was_training)
        return Evaluation(loss / count, right / count)


def build_workload(name: str, seed: int = 0) -> Workload:
    """The workload called ``name``.

    Raises:
        ValueError: there is none of that name.
    """
    if name == "mlp":
        return _digits_workload(name, seed, _mlp, 96, _sgd(0.05))
    if name == "cnn":
        return _digits_workload(name, seed, _cnn, 192, _sgd(0.03))
    if name == "gpt":
        return _text_workload(name, seed, Gpt, 3, _adamw(6e-4), _CONTEXT)
    if name == "resnet":
        return _digits_workload(name, seed, _resnet, 24, _sgd(0.02))
    if name == "vit":
        return _digits_workload(name, seed, Vit, 12, _adamw(1e-4))
    if name == "lstm":
        return _text_workload(name, seed, Lstm, 8, _adamw(1e-3), 32)
    raise ValueError(f"no model is called {name!r}; there are {', '.join(NAMES)}")


def num_parameters(model: nn.Module) -> int:
    """Elements of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _seeded(seed: int, *more: int) -> torch.Generator:
    """A generator of its own for every tuple of numbers."""
    mixed = seed
    for number in more:
        mixed = (mixed * 1_000_003 + number + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(mixed)


def seeded(seed: int, make: Callable[[], Made]) -> Callable[[], Made]:
    """``make``, with the same weights on every rank."""

    def build() -> Made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return build


def _sgd(rate: float) -> Optimizer:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def _adamw(rate: float) -> Optimizer:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)


# Digits.


@cache
def digits() -> tuple[Batch, Batch]:
    """Training and test images (n, 64) float32 in 0..1 with labels; the split is the same for every seed."""
    data = load_digits()
    images = torch.from_numpy(data.images).float().flatten(1) / 16
    labels = torch.from_numpy(data.target).long()
    order = torch.randperm(len(labels), generator=_seeded(0))
    test, train = order[:360], order[360:]
    return (images[train], labels[train]), (images[test], labels[test])


def _digits_workload(
    name: str, seed: int, make: Callable[[], nn.Module], batch_size: int, optimizer: Optimizer
) -> Workload:
    (images, labels), test = digits()

    def batch(step: int, rank: int, world_size: int) -> Batch:
        generator = _seeded(seed, step)
        drawn = torch.randint(len(labels), (world_size, batch_size), generator=generator)[rank]
        return images[drawn], labels[drawn]

    return Workload(name, seeded(seed, make), optimizer, batch, lambda: [test])


def _mlp() -> nn.Module:
    width = 2240
    layers = [nn.Linear(64, width), nn.ReLU()]
    layers += [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 600),
        nn.ReLU(),
        nn.Linear(600, 10),
    )


class Residual(nn.Module):
    """Two convolutions with batch norm around a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, before, height, width) to (batch, after, height / stride, width / stride)."""
        return functional.relu(self.inner(x) + self.shortcut(x))


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        Residual(1, 64, 1),
        Residual(64, 128, 2),
        Residual(128, 256, 2),
        Residual(256, 512, 2),
        Residual(512, 512, 1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


class Vit(nn.Module):
    """Five layers of width 384 over sixteen patches."""

    def __init__(self, width: int = 384, num_layers: int = 5, num_heads: int = 6) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 64) to logits (batch, 10)."""
        patches = images.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        return torch.as_tensor(self.head(self.encoder(self.patches(patches) + self.position).mean(1)))


# Text.

#: Newline and the printable ASCII characters; every other character of the sources is left out.
_ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
_CONTEXT = 104
_TEXT_CHARS = 4_000_000


@cache
def _source_text() -> Tensor:
    """The standard library's modules, in order of name, as int64 indices into the alphabet."""
    indices: list[int] = []
    table = {character: index for index, character in enumerate(_ALPHABET)}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        indices.extend(table[character] for character in text if character in table)
        if len(indices) >= _TEXT_CHARS:
            break
    return torch.tensor(indices[:_TEXT_CHARS])


def _text_workload(
    name: str, seed: int, make: Callable[[], nn.Module], batch_size: int, optimizer: Optimizer, context: int
) -> Workload:
    text = _source_text()
    split = len(text) * 9 // 10

    def windows(starts: Tensor) -> Batch:
        rows = text[starts[:, None] + torch.arange(context + 1)]
        return rows[:, :-1], rows[:, 1:]

    def batch(step: int, rank: int, world_size: int) -> Batch:
        size = (world_size, batch_size)
        return windows(torch.randint(split - context - 1, size, generator=_seeded(seed, step))[rank])

    def test_batches() -> list[Batch]:
        size = (4, 8)
        starts = split + torch.randint(len(text) - split - context - 1, size, generator=_seeded(0, 1))
        return [windows(row) for row in starts]

    return Workload(name, seeded(seed, make), optimizer, batch, test_batches)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, both residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + torch.as_tensor(self.feed_forward(self.norm2(x)))


class Gpt(nn.Module):
    """Six layers of width 384, by character."""

    def __init__(self, width: int = 384, num_layers: int = 6, num_heads: int = 6) -> None:
        super().__init__()
        self.token = nn.Embedding(len(_ALPHABET), width)
        self.position = nn.Embedding(_CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(_ALPHABET), bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("out.weight", "feed_forward.2.weight"))
                deviation = 0.02 / math.sqrt(2 * num_layers) if into_residual else 0.02
                nn.init.normal_(parameter, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64 to logits (batch, time, alphabet)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        return torch.as_tensor(self.head(self.norm(self.blocks(x))))


class Lstm(nn.Module):
    """Two layers of width 832, by character."""

    def __init__(self, embedded: int = 128, width: int = 832) -> None:
        super().__init__()
        self.token = nn.Embedding(len(_ALPHABET), embedded)
        self.layers = nn.LSTM(embedded, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, len(_ALPHABET))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64 to logits (batch, time, alphabet)."""
        return torch.as_tensor(self.head(self.layers(self.token(tokens))[0]))
