"""Espresso's metrics in TensorBoard, beside the loss. Needs ``pip install tensorboard``.

    torchrun --nproc-per-node 2 examples/log_to_tensorboard.py --folder build/tensorboard
    tensorboard --logdir build/tensorboard

``state.metrics()`` is a flat dict of floats, so any other logger takes it the same way.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import espresso

try:
    from torch.utils.tensorboard import SummaryWriter
except ModuleNotFoundError:
    raise SystemExit("this example needs TensorBoard: pip install tensorboard") from None

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=120)
arguments.add_argument("--folder", default="build/tensorboard")
chosen = arguments.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
# So short a run would be over while kernels are compiled beside it.
state = espresso.register(model, compressor="topk:ratio=0.05", compile_beside=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
writer = SummaryWriter(chosen.folder) if rank == 0 else None

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)[rank::world_size]
labels = torch.tensor(digits.target)[rank::world_size]
draw = torch.Generator().manual_seed(rank)
for step in range(chosen.steps):
    batch = torch.randint(len(images), (32,), generator=draw)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    if writer is not None and step % 10 == 9:
        writer.add_scalar("loss", loss.item(), step)
        for name, value in state.metrics().items():
            writer.add_scalar(name, value, step)
if writer is not None:
    writer.close()
    print(f"tensorboard --logdir {chosen.folder}")
dist.destroy_process_group()
