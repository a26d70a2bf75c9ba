"""`zf.plan`: every way to train one model on one machine, and which of them to choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zerofold.placement import Tier, Tiers
from zerofold.plan.advice import advise
from zerofold.plan.dividing import check_batch, divided, divisions, in_words
from zerofold.plan.given import Numbers, check_point, machine_of, model_of
from zerofold.plan.held import widths_of
from zerofold.plan.larger import next_larger
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point, Prediction
from zerofold.plan.predict import predict
from zerofold.plan.result import Plan, Searched
from zerofold.plan.search import search
from zerofold.plan.shape import Launching, ModelShape
from zerofold.plan.sources import build_function, build_hugging_face
from zerofold.plan.transformer import paper_of
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
    global_batch: int | None = None,
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
    global_batch  samples of a step over all ranks: micro_batch and accumulate are then chosen for each row, the fastest
                  that fits, and the search looks at such steps alone
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
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r} must be a whole number, at least 1")
    if checkpoint_every < 0:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be 0 (keep everything) or more")
    fleet = machine_of(machine, world_size, gpus_per_node, device_memory, host_memory, disk)

    def make(length: int | None) -> ModelShape:
        numbers = Numbers(layers, hidden, heads, vocab, length)
        return model_of(model, params, numbers, function, precision, flash, (checkpoint_every,), tensor)

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
    samples = None if global_batch is None else check_batch(fleet, wanted, global_batch)
    check_point(shape, fleet, wanted if samples is None else next(divisions(wanted, samples)))
    if run:
        ran = _try_here(model, function, seq, shape, fleet, wanted)
        note = f"the host took {1e3 * ran.passes:.1f} ms to launch forward and backward of one sample here"
        shape = replace(shape, launched=(ran,), notes=(*shape.notes, note))

    def predicted(point: Point) -> Prediction:
        return predict(shape, fleet, point) if samples is None else divided(shape, fleet, point, samples)

    stages = tuple(predicted(point) for point in _on_device(wanted))
    offloaded = tuple(predicted(point) for point in _offloaded(wanted, fleet, samples or accumulate))
    recommended, advice = advise(shape, fleet, stages, offloaded)
    if recommended is not None and global_batch is not None:
        said = f"{global_batch} samples to a step of all ranks: {in_words(recommended.point)}."
        advice = replace(advice, sentences=(advice.sentences[0], said, *advice.sentences[1:]))
    return Plan(
        shape,
        fleet,
        stages,
        offloaded,
        recommended,
        advice,
        _search(shape, fleet, precision, global_batch, fits=recommended is not None),
        _paper(shape, wanted),
        make if shape.source in ("count", "shape") else None,
        global_batch,
    )


def _search(model: ModelShape, machine: Machine, precision: str, global_batch: int | None, *, fits: bool) -> Searched:
    """Tensor and pipeline degrees are among what is searched; what the larger model needs is looked for without them,
    since they ask for more than more memory, and only where the model itself fits."""
    if not model.activities:
        return Searched(is_done=False)
    result = search(model, machine, precision=precision, global_samples=global_batch)
    if not fits:
        return Searched(result.best, result.tried, samples=global_batch)
    plain = replace(result, space=replace(result.space, tensor=(1,), pipeline=(1,)))
    return Searched(result.best, result.tried, next_larger(model, machine, plain).sentence, samples=global_batch)


def _on_device(wanted: Point) -> Iterator[Point]:
    for stage in STAGES:
        yield replace(wanted, stage=stage)


def _offloaded(wanted: Point, machine: Machine, accumulate: int) -> Iterator[Point]:
    """What is worth a look: where a row can do it, and where there is a memory for it."""
    for stage in ("2", "3"):
        yield replace(wanted, stage=stage, tiers=_HOST_OPTIMIZER)
        if machine.disk:
            yield replace(wanted, stage=stage, tiers=_DISK_OPTIMIZER)
    yield replace(wanted, stage="3", tiers=_HOST_ALL)
    if machine.disk:
        yield replace(wanted, stage="3", tiers=_DISK_ALL)
    if accumulate > 1:  # whole sums stay on the device, and go down once
        yield replace(wanted, stage="1", tiers=_HOST_OPTIMIZER)
        yield replace(wanted, stage="1", auto=True)
    yield replace(wanted, stage="3", auto=True)


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
    found = paper_of(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        seq=shape.tokens,
        samples=point.micro_batch,
        checkpoint_every=point.checkpoint_every,
    )
    return {
        "parameters": found.parameters,
        "activation_checkpoints_bytes": found.activation_checkpoints,
        "activation_working_bytes": found.activation_working,
        "model_state_working_bytes": found.model_state_working,
    }
