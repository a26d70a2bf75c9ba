"""How many sequences a rank computes at a time, where only those of a step are given: the fastest by the plan."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zerofold.activation.automatic import machine_here
from zerofold.plan.batching import Batching, choose_batching
from zerofold.plan.point import Point
from zerofold.samples import Shares
from zerofold.train.amounts import workload
from zerofold.train.options import TrainOptions


def planned_batching(options: TrainOptions, shares: Shares, world: int, device: torch.device) -> Batching | None:
    """As rank 0 sees its memory: all ranks must go the same way. None where the options say it, or nothing fits."""
    if not options.leaves_batch_open:
        return None
    chosen: list[Batching | None] = [None]
    if dist.get_rank() == 0:
        machine = machine_here(device, None, path=options.offload_path, ranks=world)
        point = Point(
            stage=str(options.stage),
            group=options.degrees.in_group(world),
            checkpoint_every=options.checkpoint_every,
            precision=options.precision,
            tensor=options.tensor,
        )
        shape = workload(options, 1).shape
        samples = shares.micro * shares.accumulate
        chosen = [choose_batching(shape, machine, point, samples, most=options.at_once)]
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def batched(shares: Shares, batching: Batching | None) -> Shares:
    """
    >>> batched(Shares(8, 2, 4), Batching(16, 2, "host", False, 0.1, "it pays"))
    Shares(micro=16, ranks=2, accumulate=2)
    """
    if batching is None:
        return shares
    return shares._replace(micro=batching.micro_batch, accumulate=batching.accumulate)
