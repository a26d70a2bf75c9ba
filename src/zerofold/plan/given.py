"""What `zf.plan` is given: a model, a machine and a point, read and checked. Messages name arguments as `name=`, which
the command turns into its options."""

from __future__ import annotations

import os
from typing import NamedTuple

from zerofold.placement import Tier
from zerofold.plan.machine import Machine
from zerofold.plan.mesh import mesh_of
from zerofold.plan.pipelining import check_schedule, chunks_of
from zerofold.plan.point import Point
from zerofold.plan.presets import changed, preset
from zerofold.plan.shape import ModelShape
from zerofold.plan.sources import from_function, from_hugging_face
from zerofold.plan.transformer import SEQUENCE, VOCABULARY, GPTNumbers, from_numbers, from_parameters


def check_point(model: ModelShape, machine: Machine, point: Point) -> None:
    """What no arithmetic would notice."""
    tiers = [tier.value for tier in Tier]
    if point.checkpoints_on not in tiers:
        raise ValueError(f"keep={point.checkpoints_on!r} is not known; choose {', '.join(tiers)}")
    if (point.checkpoints_on != Tier.DEVICE.value or point.partition) and not point.checkpoint_every:
        raise ValueError("keep= and partition= are about inputs of checkpointed blocks; add checkpoint_every=1")
    if point.contiguous_checkpoints and (point.keeps_away or not point.checkpoint_every):
        raise ValueError(
            f"contiguous_checkpoints= is about inputs of checkpointed blocks on the device, and here is "
            f"checkpoint_every={point.checkpoint_every}, keep={point.checkpoints_on!r}; leave it out"
        )
    if point.checkpoints_on == Tier.NVME.value and not machine.disk:
        raise ValueError("keep='nvme' needs a disk, and this machine has none; give disk=")
    for name, is_on in (
        ("partition", point.partition),
        ("sequence_parallel", point.sequence_parallel),
        ("loss_parallel", point.loss_parallel),
    ):
        if is_on and point.tensor == 1:
            raise ValueError(f"{name}= is about tensor-parallel ranks, and tensor=1; give another tensor=")
    if point.partition and point.sequence_parallel:
        raise ValueError(
            "partition=True has nothing to cut with sequence-parallel norms, whose inputs are in parts already; leave "
            "one of them out"
        )
    if model.heads and model.heads % point.tensor:
        raise ValueError(f"tensor={point.tensor} does not divide the {model.heads} attention heads; choose a divisor")
    if model.layers and model.layers < point.pipeline * chunks_of(point):
        raise ValueError(
            f"pipeline={point.pipeline} with schedule={point.schedule!r} needs at least "
            f"{point.pipeline * chunks_of(point)} blocks, and {model.name} has {model.layers}; choose fewer stages"
        )
    mesh_of(machine, point)  # what does not divide is refused here
    check_schedule(point)


def machine_of(
    machine: str | Machine,
    world_size: int | None,
    gpus_per_node: int | None,
    device_memory: int | None,
    host_memory: int | None,
    disk: int | None,
) -> Machine:
    for name, number in (("world_size", world_size), ("gpus_per_node", gpus_per_node)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number!r} must be a whole number, at least 1")
    for name, amount in (("device_memory", device_memory), ("host_memory", host_memory), ("disk", disk)):
        if amount is not None and (isinstance(amount, str) or amount < 0):
            raise ValueError(f"{name}={amount!r} must be a number of bytes, such as 80e9")
    found = preset(machine, devices=world_size or 1) if isinstance(machine, str) else machine
    return changed(
        found,
        devices=world_size,
        per_node=gpus_per_node,
        device_memory=device_memory,
        host_memory=host_memory,
        disk=disk,
    )


class Numbers(NamedTuple):
    """Of a GPT, as far as they were given."""

    layers: int | None
    hidden: int | None
    heads: int | None
    vocab: int | None
    seq: int | None


def model_of(
    model: str | ModelShape | None,
    params: float | None,
    numbers: Numbers,
    function: str | None,
    precision: str,
    flash: bool,
    checkpoint_every: tuple[int, ...],
    tensor: int,
) -> ModelShape:
    layers, hidden, heads, vocab, seq = numbers
    has_numbers = any(number is not None for number in (layers, hidden, heads))
    given = [
        name
        for name, value in (
            ("model=", model is not None),
            ("params=", params is not None),
            ("layers=, hidden=, heads=", has_numbers),
            ("function=", function is not None),
        )
        if value
    ]
    if len(given) != 1:
        which = f"{' and '.join(given)} are" if given else "nothing is"
        raise ValueError(
            f"a model is given by one of model=, params=, layers= with hidden= and heads=, or function=; {which} given"
        )
    if vocab is not None and (model is not None or function is not None):
        where = "model=" if model is not None else "function="
        raise ValueError(f"vocab={vocab} is of a GPT given by its numbers, and {where} has its own; leave it out")
    if isinstance(model, ModelShape):
        return model
    if model is not None:
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(
                f"model= is a {type(model).__name__}: give a Hugging Face folder or its config.json, or for a model of "
                "your own function='module:function', which builds it"
            )
        return from_hugging_face(model, seq=seq, precision=precision, checkpoint_every=checkpoint_every)
    if function is not None:
        return from_function(function, seq=seq, precision=precision, checkpoint_every=checkpoint_every)
    if params is not None:
        return from_parameters(
            params,
            seq=seq or SEQUENCE,
            vocab=vocab,
            precision=precision,
            flash=flash,
            checkpoint_every=checkpoint_every,
            divisor=tensor,
        )
    if layers is None or hidden is None or heads is None:
        missing = [n for n, v in (("layers", layers), ("hidden", hidden), ("heads", heads)) if v is None]
        add = " and ".join(f"{name}=" for name in missing)
        raise ValueError(f"a model given by its numbers needs layers=, hidden= and heads=; add {add}")
    size = GPTNumbers(layers=layers, hidden=hidden, heads=heads, vocab=vocab or VOCABULARY, seq=seq or SEQUENCE)
    return from_numbers(size, precision=precision, flash=flash, checkpoint_every=checkpoint_every)
