"""CLAN: LANS over a two-way compressed exchange, instead of Adam over an exact one.

    torchrun --nproc-per-node 2 examples/clan.py

The optimizer registers the exchange itself. Checkpoints have two parts: the optimizer's, equal on all ranks, and the
exchange's residuals, which are this rank's own.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import espresso

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=200)
chosen = arguments.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = espresso.optim.CLAN(model, lr=0.01, compressor="efsignsgd")
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=chosen.steps)

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)[rank::world_size]
labels = torch.tensor(digits.target)[rank::world_size]
draw = torch.Generator().manual_seed(rank)
loss = torch.tensor(0.0)
for _ in range(chosen.steps):
    batch = torch.randint(len(images), (32,), generator=draw)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    schedule.step()

checkpoint = {"optimizer": optimizer.state_dict(), "exchange": optimizer.exchange.state_dict()}
if rank == 0:
    kept = optimizer.exchange.metrics()["espresso/residual_bytes"]
    print(f"loss {loss.item():.3f}; {kept / 1e3:.0f} kB of residuals on this rank")
dist.destroy_process_group()
