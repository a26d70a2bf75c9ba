"""`zf.plan`: every way to train one model on one machine, and which of them to choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from zerofold.placement import Tier, Tiers
from zerofold.plan.advice import advise
from zerofold.plan.held import widths_of
from zerofold.plan.larger import next_larger
from zerofold.plan.machine import Machine
from zerofold.plan.pipelining import check_schedule, chunks_of
from zerofold.plan.point import Point
from zerofold.plan.predict import predict
from zerofold.plan.presets import changed, preset
from zerofold.plan.result import Plan, Searched
from zerofold.plan.search import search
from zerofold.plan.shape import Launching, ModelShape
from zerofold.plan.sources import build_function, build_hugging_face, from_function, from_hugging_face
from zerofold.plan.transformer import SEQUENCE, VOCABULARY, GPTNumbers, from_numbers, from_parameters
from zerofold.plan.trial import try_here

STAGES = ("0", "1", "2", "3", "dp", "hsdp", "hpz")
DEFAULT_PRESET = "A100-80"
_HOST_OPTIMIZER = Tiers(Tier.HOST, Tier.HOST, Tier.DEVICE)
_HOST_ALL = Tiers(Tier.HOST, Tier.HOST, Tier.HOST)
_DISK_OPTIMIZER = Tiers(Tier.NVME, Tier.HOST, Tier.DEVICE)
_DISK_ALL = Tiers(Tier.NVME, Tier.NVME, Tier.NVME)


def plan(
    model: str | ModelShape | None = None,
    *,
    params: float | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    vocab: int | None = None,
    seq: int | None = None,
    function: str | None = None,
    machine: str | Machine = DEFAULT_PRESET,
    world_size: int | None = None,
    gpus_per_node: int | None = None,
    micro_batch: int = 1,
    accumulate: int = 1,
    checkpoint_every: int = 1,
    keep: str = "device",
    partition: bool = False,
    tensor: int = 1,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    pipeline: int = 1,
    schedule: str = "1f1b",
    chunks: int = 0,
    precision: str = "bf16",
    flash: bool = True,
    group: int = 0,
    contiguous_gradients: bool = False,
    contiguous_checkpoints: bool = False,
    device_memory: int | None = None,
    host_memory: int | None = None,
    disk: int | None = None,
    run: bool = False,
) -> Plan:
    """Bytes, traffic and time of every row of the table, with and without offloading, and one to choose.

    model         a Hugging Face folder or config.json; or a `ModelShape`
    params        instead: a number of parameters, of which a GPT of usual proportions is made
    layers, hidden, heads, vocab, seq
                  instead: the numbers of a GPT
    function      instead: "module:function" that builds a model, or a model and an example of its inputs
    machine       the name of a preset, or a `Machine`; the other arguments change it
    keep          where inputs of checkpointed blocks wait: "device", "host" or "nvme"; with `partition` each
                  tensor-parallel rank keeps its part of them
    tensor        ranks that share the inside of every layer; sequence_parallel: norms too; loss_parallel: logits too
    contiguous_gradients
                  as `zf.prepare` takes it: gradients in one block, in forward too
    contiguous_checkpoints
                  `contiguous=True` of `zf.checkpoint_blocks`: those inputs in one block of the device, which stays
    pipeline      ranks that follow each other, with `accumulate` micro-batches by a schedule: "gpipe", "1f1b",
                  "interleaved" or "zero_bubble" (in `chunks` of blocks a rank), "zbv"
    run           takes some steps of a config's or function's model here, for what they take the host; the machine must
                  be `zerofold.plan.measure.this_machine()`

    >>> import zerofold as zf
    >>> found = zf.plan(params=7.5e9, world_size=64)
    >>> [round(row["model_state_bytes"] / 1e9, 1) for row in found.to_dict()["stages"][:4]]
    [120.0, 31.4, 16.6, 1.9]
    >>> found.recommended.fits
    True
    >>> zf.plan(params=7.5e9, world_size=64, tensor=2, pipeline=2, accumulate=8).mesh["bubble"]
    0.1111111111111111
    """
    degrees = (("micro_batch", micro_batch), ("accumulate", accumulate), ("tensor", tensor), ("pipeline", pipeline))
    for name, number in degrees:
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    if checkpoint_every < 0:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be 0 (keep everything) or more")
    fleet = _machine(machine, world_size, gpus_per_node, device_memory, host_memory, disk)

    def make(length: int | None) -> ModelShape:
        numbers = Numbers(layers, hidden, heads, vocab, length)
        return _model(model, params, numbers, function, precision, flash, (checkpoint_every,), tensor)

    shape = make(seq)
    if fleet.disk and widths_of(precision).keeps_range:
        fleet = replace(fleet, disk=0)
        shape = replace(shape, notes=(*shape.notes, "the update of states in a file has no fp16: the disk is not used"))
    wanted = Point(
        micro_batch=micro_batch,
        accumulate=accumulate,
        checkpoint_every=checkpoint_every,
        checkpoints_on=keep,
        partition=partition,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        loss_parallel=loss_parallel,
        pipeline=pipeline,
        schedule=schedule,
        chunks=chunks,
        precision=precision,
        group=group,
        contiguous_gradients=contiguous_gradients,
        contiguous_checkpoints=contiguous_checkpoints,
    )
    _check_point(shape, fleet, wanted)
    if run:
        ran = _try_here(model, function, seq, shape, fleet, wanted)
        note = f"the host took {1e3 * ran.passes:.1f} ms to launch forward and backward of one sample here"
        shape = replace(shape, launched=(ran,), notes=(*shape.notes, note))
    stages = tuple(predict(shape, fleet, point) for point in _on_device(wanted))
    offloaded = tuple(predict(shape, fleet, point) for point in _offloaded(wanted, fleet))
    recommended, advice = advise(shape, fleet, stages, offloaded)
    return Plan(
        shape,
        fleet,
        stages,
        offloaded,
        recommended,
        advice,
        _search(shape, fleet, precision, fits=recommended is not None),
        _paper(shape, wanted),
        make if shape.source in ("count", "shape") else None,
    )


def _check_point(model: ModelShape, machine: Machine, point: Point) -> None:
    """What no arithmetic would notice."""
    tiers = [tier.value for tier in Tier]
    if point.checkpoints_on not in tiers:
        raise ValueError(f"keep={point.checkpoints_on!r} is not known; choose {', '.join(tiers)}")
    if (point.checkpoints_on != Tier.DEVICE.value or point.partition) and not point.checkpoint_every:
        raise ValueError("keep and partition are about inputs of checkpointed blocks; add checkpoint_every=1")
    if point.contiguous_checkpoints and (point.keeps_away or not point.checkpoint_every):
        raise ValueError(
            f"contiguous_checkpoints is about inputs of checkpointed blocks on the device, and here is "
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
            raise ValueError(f"{name} is about tensor-parallel ranks, and tensor is 1; give tensor=")
    if point.partition and point.sequence_parallel:
        raise ValueError(
            "partition=True has nothing to cut with sequence-parallel norms, whose inputs are in parts already; leave "
            "one of them out"
        )
    check_schedule(point)
    if model.heads and model.heads % point.tensor:
        raise ValueError(f"tensor={point.tensor} does not divide the {model.heads} attention heads; choose a divisor")
    if model.layers and model.layers < point.pipeline * chunks_of(point):
        raise ValueError(
            f"pipeline={point.pipeline} with schedule={point.schedule!r} needs at least "
            f"{point.pipeline * chunks_of(point)} blocks, and {model.name} has {model.layers}; choose fewer stages"
        )


def _search(model: ModelShape, machine: Machine, precision: str, *, fits: bool) -> Searched:
    """Tensor and pipeline degrees are among what is searched; what the larger model needs is looked for without them,
    since they ask for more than more memory, and only where the model itself fits."""
    if not model.activities:
        return Searched(is_done=False)
    result = search(model, machine, precision=precision)
    if not fits:
        return Searched(result.best, result.tried)
    plain = replace(result, space=replace(result.space, tensor=(1,), pipeline=(1,)))
    return Searched(result.best, result.tried, next_larger(model, machine, plain).sentence)


def _on_device(wanted: Point) -> Iterator[Point]:
    for stage in STAGES:
        yield replace(wanted, stage=stage)


def _offloaded(wanted: Point, machine: Machine) -> Iterator[Point]:
    """What is worth a look: where a row can do it, and where there is a memory for it."""
    for stage in ("2", "3"):
        yield replace(wanted, stage=stage, tiers=_HOST_OPTIMIZER)
        if machine.disk:
            yield replace(wanted, stage=stage, tiers=_DISK_OPTIMIZER)
    yield replace(wanted, stage="3", tiers=_HOST_ALL)
    if machine.disk:
        yield replace(wanted, stage="3", tiers=_DISK_ALL)
    if wanted.accumulate > 1:  # whole sums stay on the device, and go down once
        yield replace(wanted, stage="1", tiers=_HOST_OPTIMIZER)
        yield replace(wanted, stage="1", auto=True)
    yield replace(wanted, stage="3", auto=True)


def _machine(
    machine: str | Machine,
    world_size: int | None,
    gpus_per_node: int | None,
    device_memory: int | None,
    host_memory: int | None,
    disk: int | None,
) -> Machine:
    for name, number in (("world_size", world_size), ("gpus_per_node", gpus_per_node)):
        if number is not None and number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
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


def _model(
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
            ("model", model is not None),
            ("params", params is not None),
            ("layers, hidden, heads", has_numbers),
            ("function", function is not None),
        )
        if value
    ]
    if len(given) != 1:
        which = f"both {' and '.join(given)}" if given else "nothing"
        raise ValueError(
            f"a model is given by one of model, params, layers with hidden and heads, or function; {which} is given"
        )
    if isinstance(model, ModelShape):
        return model
    if model is not None:
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
        raise ValueError(f"a model given by its numbers needs layers, hidden and heads; add {' and '.join(missing)}")
    size = GPTNumbers(layers=layers, hidden=hidden, heads=heads, vocab=vocab or VOCABULARY, seq=seq or SEQUENCE)
    return from_numbers(size, precision=precision, flash=flash, checkpoint_every=checkpoint_every)


def _try_here(
    model: str | ModelShape | None,
    function: str | None,
    seq: int | None,
    shape: ModelShape,
    fleet: Machine,
    point: Point,
) -> Launching:
    if fleet.source != "measured":
        raise ValueError(f"--run measures on this machine, and the plan is for {fleet.name}: add --this-machine")
    if function is not None:
        return try_here(build_function(function, seq), shape, fleet, point)
    if isinstance(model, str):
        return try_here(build_hugging_face(model, seq), shape, fleet, point)
    raise ValueError("--run needs a model that can be built: a Hugging Face config, or --function module:function")


def _paper(shape: ModelShape, point: Point) -> dict[str, float]:
    if not (shape.layers and shape.hidden and shape.heads):
        return {}
    size = GPTNumbers(
        layers=shape.layers, hidden=shape.hidden, heads=shape.heads, vocab=shape.vocab or 1, seq=shape.tokens
    )
    found = size.paper(point.micro_batch, point.checkpoint_every)
    return {
        "parameters": found.parameters,
        "activation_checkpoints_bytes": found.activation_checkpoints,
        "activation_working_bytes": found.activation_working,
        "model_state_working_bytes": found.model_state_working,
    }
