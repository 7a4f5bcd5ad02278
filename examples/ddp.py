"""DDP with compressed gradients, from ``init_process_group`` to a checkpoint and on from it. Start it twice:

    torchrun --nproc-per-node 2 examples/ddp.py --checkpoint build/ddp

The second start goes on where the first one ended. Data: the digits that ship with scikit-learn. To see how an error is
caught, end one of the two processes while it trains (``--steps 100000``, and ``kill`` in another terminal).
"""

import argparse
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import espresso

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=120)
arguments.add_argument("--width", type=int, default=512)
arguments.add_argument("--checkpoint", type=Path, help="a folder: written at the end, read at the start")
chosen = arguments.parse_args()

logging.basicConfig(level=logging.WARNING, format="%(message)s")
dist.init_process_group("gloo")  # "nccl" for models on GPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
logging.getLogger("espresso").setLevel(logging.INFO if rank == 0 else logging.WARNING)

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, chosen.width), nn.ReLU(), nn.Linear(chosen.width, chosen.width), nn.ReLU())
net.append(nn.Linear(chosen.width, 10))
model = DistributedDataParallel(net)
state = espresso.register(model, compile_beside=False)  # the one line; the first run compiles for a minute
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)[rank::world_size]
labels = torch.tensor(digits.target)[rank::world_size]

first_step = 0
path = None if chosen.checkpoint is None else chosen.checkpoint / f"rank{rank}.pt"
saved = torch.load(path, weights_only=True) if path is not None and path.exists() else None
steps = [None] * world_size
dist.all_gather_object(steps, None if saved is None else saved["step"])
if len(set(steps)) > 1:  # all ranks load or none does: one alone would wait for the others until its time-out
    raise SystemExit(f"rank {rank}: {chosen.checkpoint} is not of these ranks; steps by rank: {steps}")
if saved is not None:
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load_state_dict(saved["espresso"])  # what this rank has not sent yet, and the strategy
    first_step = saved["step"]

draw = torch.Generator().manual_seed(first_step * world_size + rank)
loss = torch.tensor(0.0)
try:
    with state.errors():  # without it backward() would raise DDP's "Unable to cast …"
        for _ in range(first_step, first_step + chosen.steps):
            batch = torch.randint(len(images), (32,), generator=draw)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
except espresso.EspressoError as error:  # another rank died, hangs or failed: the message says which
    raise SystemExit(f"rank {rank}: {error}") from None

if path is not None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "espresso": state.state_dict()}
    torch.save({"step": first_step + chosen.steps, **parts}, path)
if rank == 0:
    print(state.summary())
    print(f"steps {first_step} to {first_step + chosen.steps}: loss {loss.item():.3f}")
dist.destroy_process_group()
