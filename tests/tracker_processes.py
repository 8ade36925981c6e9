"""One of the processes that train a model together in tests/test_tracker_processes.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from qkform.dynamics import Tracker
from qkform.errors import RecordError

STEPS, SEQUENCES, TOKENS, WIDTH = 3, 4, 5, 8


def model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 13, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SEQUENCES, TOKENS, WIDTH, generator=generator)


def mine(batch, rank, world):
    return batch[rank * SEQUENCES // world : (rank + 1) * SEQUENCES // world]


def train(net, tracker, rank=0, world=1):
    """A plain loop over this process's part of each batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with tracker:
        tracker.step(0, optimizer=optimizer)
        for step in range(1, STEPS + 1):
            x = mine(tokens(step), rank, world)
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.step(step, loss=loss, optimizer=optimizer, tokens=x.shape[0] * TOKENS)


def sharded(net):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def run(kind, rank, world, folder):
    net = model()
    net = sharded(net) if kind == "fsdp2" else nn.parallel.DistributedDataParallel(net)
    train(net, Tracker(net, every=2, path=folder / f"{kind}.jsonl", probe={"src": tokens(99)}), rank, world)
    try:
        Tracker(net, path=folder / f"{kind}.jsonl").step(0)
    except RecordError as error:
        (folder / f"{kind}-{rank}.error").write_text(str(error))


def main(rank, world, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        for kind in ("ddp", "fsdp2"):
            run(kind, rank, world, folder)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
