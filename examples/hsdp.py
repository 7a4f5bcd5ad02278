"""HSDP: FSDP2 shards a model inside every host, espresso compresses what goes between the hosts. Start it twice:

    torchrun --nproc-per-node 4 examples/hsdp.py --shards 2 --checkpoint build/hsdp

The second start goes on where the first one ended. On hosts of their own leave ``--shards`` away: it is then the number
of ranks of a host. Data: the language reference that ships with Python (``pydoc_data``).
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import espresso.fsdp


class Reader(nn.Module):
    """Predicts the next character."""

    def __init__(self, characters: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.head(x)


arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=200)
arguments.add_argument("--width", type=int, default=128)
arguments.add_argument("--layers", type=int, default=4)
arguments.add_argument("--context", type=int, default=64)
arguments.add_argument("--accumulate", type=int, default=2, help="backward passes a step")
arguments.add_argument("--shards", type=int, help="ranks that share one copy of the model")
arguments.add_argument("--checkpoint", type=Path, help="a folder: written at the end, read at the start")
chosen = arguments.parse_args()

dist.init_process_group("gloo")  # "nccl" for models on GPUs
rank = dist.get_rank()
text = "".join(topics.values())[:200_000]
alphabet = sorted(set(text))
data = torch.tensor([alphabet.index(character) for character in text])

model = Reader(len(alphabet), chosen.context, chosen.width, chosen.layers)
state = espresso.fsdp.hybrid_shard(model, blocks=model.blocks, shards=chosen.shards, compressor="efsignsgd")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding: it holds shards

first_step = 0
whole = [] if chosen.checkpoint is None else chosen.checkpoint.glob("*/.metadata")  # it is written last
latest = max((path.parent for path in whole), key=lambda path: int(path.name), default=None)
if latest is not None:
    weights, moments = get_state_dict(model, optimizer)
    # The state: what was not sent yet, and the strategy. Any number of ranks and shards takes it over.
    dcp.load({"model": weights, "optimizer": moments, "espresso": state}, checkpoint_id=latest)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    first_step = int(latest.name)

draw = torch.Generator().manual_seed(first_step * dist.get_world_size() + rank)
loss = torch.tensor(0.0)
for _ in range(first_step, first_step + chosen.steps):
    optimizer.zero_grad()
    for part in range(chosen.accumulate):
        model.set_requires_gradient_sync(part == chosen.accumulate - 1)  # only the last one is exchanged
        starts = torch.randint(len(data) - chosen.context - 1, (8, 1), generator=draw)
        windows = data[starts + torch.arange(chosen.context + 1)]
        loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        (loss / chosen.accumulate).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # gradients are averages over all ranks by now
    optimizer.step()

if chosen.checkpoint is not None:
    weights, moments = get_state_dict(model, optimizer)
    path = chosen.checkpoint / str(first_step + chosen.steps)
    dcp.save({"model": weights, "optimizer": moments, "espresso": state}, checkpoint_id=path)
if rank == 0:
    print(state.summary())
    print(f"steps {first_step} to {first_step + chosen.steps}: loss {loss.item():.3f}")
dist.destroy_process_group()
