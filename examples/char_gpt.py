"""A character GPT: AdamW, gradient accumulation, clipping, bf16 autocast, a learning-rate schedule, an evaluation.

    torchrun --nproc-per-node 2 examples/char_gpt.py

Data: the language reference that ships with Python (``pydoc_data``). Nothing here knows of compression but two lines.
"""

import argparse
from contextlib import nullcontext
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import espresso


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, 2))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    def __init__(self, characters: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, characters, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.place(places)))


arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=300)
arguments.add_argument("--width", type=int, default=128)
arguments.add_argument("--layers", type=int, default=4)
arguments.add_argument("--context", type=int, default=64)
arguments.add_argument("--accumulate", type=int, default=4, help="backward passes a step")
arguments.add_argument("--compressor", default="auto")
chosen = arguments.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
text = "".join(topics.values())
alphabet = sorted(set(text))
data = torch.tensor([alphabet.index(character) for character in text[:200_000]])
held_out, data = data[:20_000], data[20_000:]

torch.manual_seed(0)
model = DistributedDataParallel(Gpt(len(alphabet), chosen.context, chosen.width, chosen.layers))
state = espresso.register(model, compressor=chosen.compressor)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps)
draw = torch.Generator().manual_seed(rank)


def loss_of(source: Tensor) -> Tensor:
    starts = torch.randint(len(source) - chosen.context - 1, (8, 1), generator=draw)
    windows = source[starts + torch.arange(chosen.context + 1)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(windows[:, :-1])
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), windows[:, 1:].flatten())


for _ in range(chosen.steps):
    optimizer.zero_grad()
    for part in range(chosen.accumulate):
        # Only the last backward pass of a step exchanges gradients.
        with model.no_sync() if part < chosen.accumulate - 1 else nullcontext():
            (loss_of(data) / chosen.accumulate).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()

model.eval()
with torch.no_grad():
    loss = sum(loss_of(held_out) for _ in range(10)) / 10
if rank == 0:
    print(f"{chosen.steps} steps; held-out loss {loss:.3f} nats a character")
dist.destroy_process_group()
