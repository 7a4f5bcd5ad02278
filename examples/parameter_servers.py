"""Parameter servers: of four processes three train and one serves. Either launcher will do:

    torchrun --nproc-per-node 4 -m espresso.launch --servers 1 examples/parameter_servers.py
    mpirun -np 4 python -m espresso.launch --servers 1 examples/parameter_servers.py

The script is an ordinary DDP script. Here everything goes through the server, compressed both ways; with
``strategy="auto"`` the server would be one possibility among others.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import espresso

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=100)
chosen = arguments.parse_args()

dist.init_process_group("gloo")  # of the workers; the server is no part of it
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
spec = espresso.CompressorSpec.parse("int8")
state = espresso.register(model, compressor=spec, strategy=espresso.optim.TwoWay(spec))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

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

metrics = state.metrics()
if rank == 0:
    through = int(metrics["espresso/tensors_through_servers"])
    print(f"{world_size} workers; loss {loss.item():.3f}; {through} tensors went through the server")
dist.destroy_process_group()
