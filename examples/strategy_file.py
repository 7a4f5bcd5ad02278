"""A strategy file, made without ranks or measurements and given to a job. One command for each:

    python examples/strategy_file.py make strategy.json --nodes 2 --ranks-per-node 1
    torchrun --nproc-per-node 2 examples/strategy_file.py train strategy.json

Here a rule of thumb decides: one-bit signs for large matrices, everything else as it is. ``espresso search`` writes a
file of the same form from a measured job, and ``espresso explain strategy.json`` says what is in it.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import espresso
from espresso import Choice, Cluster, CompressorSpec, Strategy, TensorSpec, parse_option


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def make(path: Path, cluster: Cluster) -> None:
    tensors = [TensorSpec(name, tuple(p.shape), "float32") for name, p in network().named_parameters()]
    # Compress, exchange the payloads of all ranks, decode and add up.
    signs = Choice(parse_option("comp > flat.allgather > dec"), CompressorSpec.parse("efsignsgd"))
    large = {tensor.name: signs for tensor in tensors if tensor.numel >= 16384}
    strategy = Strategy.uniform(tensors, cluster).with_choices(large)
    strategy.save(path)
    print(f"{path}: {len(large)} of {len(tensors)} tensors compressed")


def train(path: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    # One rank per node leaves the flat options, which this strategy is made of.
    state = espresso.register(model, strategy=path, ranks_per_node=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)[rank::world_size]
    labels = torch.tensor(digits.target)[rank::world_size]
    draw = torch.Generator().manual_seed(rank)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        batch = torch.randint(len(images), (32,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    metrics = state.metrics()
    if rank == 0:
        saved = metrics["espresso/bytes_raw"] / metrics["espresso/bytes_sent"]
        print(f"loss {loss.item():.3f}; a rank sent {saved:.1f} times less than without compression")
    dist.destroy_process_group()


parser = argparse.ArgumentParser()
commands = parser.add_subparsers(dest="command", required=True)
maker = commands.add_parser("make")
maker.add_argument("path", type=Path)
maker.add_argument("--nodes", type=int, default=2)
maker.add_argument("--ranks-per-node", type=int, default=1)
trainer = commands.add_parser("train")
trainer.add_argument("path", type=Path)
trainer.add_argument("--steps", type=int, default=60)
chosen = parser.parse_args()
if chosen.command == "make":
    make(chosen.path, Cluster(chosen.nodes, chosen.ranks_per_node))
else:
    train(chosen.path, chosen.steps)
