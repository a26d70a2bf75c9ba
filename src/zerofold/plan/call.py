"""`zf.plan`: every way to train one model on one machine, and which of them to choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zerofold.placement import Tier, Tiers, row
from zerofold.plan.advice import Advice, advise
from zerofold.plan.configs import ds_config, native
from zerofold.plan.held import ranks_of, widths_of
from zerofold.plan.larger import next_larger
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point, Prediction
from zerofold.plan.predict import predict
from zerofold.plan.presets import changed, preset
from zerofold.plan.search import search
from zerofold.plan.shape import ModelShape
from zerofold.plan.sources import from_function, from_hugging_face
from zerofold.plan.states import StateBytes, elements_sent, paper_bytes
from zerofold.plan.text import plan_text
from zerofold.plan.transformer import SEQUENCE, VOCABULARY, GPTNumbers, from_numbers, from_parameters

STAGES = ("0", "1", "2", "3", "dp", "hsdp", "hpz")
DEFAULT_PRESET = "A100-80"
_HOST_OPTIMIZER = Tiers(Tier.HOST, Tier.HOST, Tier.DEVICE)
_HOST_ALL = Tiers(Tier.HOST, Tier.HOST, Tier.HOST)
_DISK_OPTIMIZER = Tiers(Tier.NVME, Tier.HOST, Tier.DEVICE)
_DISK_ALL = Tiers(Tier.NVME, Tier.NVME, Tier.NVME)


@dataclass(frozen=True)
class Searched:
    """What comes out when batch, checkpoints and degrees are free."""

    best: Prediction | None = None
    tried: int = 0
    larger: str = ""
    """What the next larger model needs, in a sentence."""


@dataclass(frozen=True)
class Plan:
    """What `zf.plan` found.

    `stages` has a prediction for each row with all states on the device, `offloaded` those with tiers; `recommended`
    is one of them or found by the search, None where nothing fits.
    """

    model: ModelShape
    machine: Machine
    stages: tuple[Prediction, ...]
    offloaded: tuple[Prediction, ...]
    recommended: Prediction | None
    advice: Advice
    searched: Searched
    paper: dict[str, float] = field(default_factory=dict)
    """The memory model of ZeRO-Infinity for a transformer, where its numbers are known."""
    remake: Callable[[int], ModelShape] | None = field(default=None, compare=False, repr=False)
    """The model with sequences of another length, where it is made by formula."""

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of `zf.prepare` for what is recommended; "mesh" is the shape of a device mesh."""
        found = self.recommended
        return {} if found is None else native(found.point, ranks_of(self.machine, found.point), found.memory)

    @property
    def ds_config(self) -> dict[str, Any]:
        """The same as a ds_config.json."""
        found = self.recommended
        return {} if found is None else ds_config(found.point, ranks_of(self.machine, found.point))

    @property
    def next_larger(self) -> str:
        """What a model of twice the blocks needs, in a sentence."""
        return self.searched.larger

    def to_dict(self) -> dict[str, Any]:
        """What `zerofold plan --json` prints."""
        chosen = self.recommended
        return {
            "title": f"{self.model.name} on {self.machine.devices} of {self.machine.name}",
            "model": {
                "name": self.model.name,
                "psi": self.model.parameters,
                "trained": self.model.trained,
                "source": self.model.source,
                "layers": self.model.layers,
                "hidden": self.model.hidden,
                "heads": self.model.heads,
                "vocab": self.model.vocab,
                "tokens": self.model.tokens,
                "notes": list(self.model.notes),
            },
            "machine": {
                "name": self.machine.name,
                "source": self.machine.source,
                "devices": self.machine.devices,
                "per_node": self.machine.per_node,
                "device_memory_bytes": self.machine.device_memory,
                "host_memory_bytes": self.machine.host_memory,
                "disk_bytes": self.machine.disk,
            },
            "counted": "model_state_bytes and its parts as the ZeRO paper counts; held_bytes as zerofold holds them",
            "stages": [self._row(each) for each in self.stages],
            "offloaded": [self._row(each) for each in self.offloaded],
            "recommended": None
            if chosen is None
            else {
                **self._row(chosen),
                "reason": self.advice.reason,
                "config": self.config,
                "ds_config": self.ds_config,
            },
            "advice": list(self.advice.sentences),
            "search": None
            if self.searched.best is None
            else {**self._row(self.searched.best), "tried": self.searched.tried},
            "next_larger": self.next_larger,
            "paper": self.paper,
        }

    def _row(self, found: Prediction) -> dict[str, Any]:
        point, memory, times = found.point, found.memory, found.times
        ranks = ranks_of(self.machine, point)
        share = self.model.parameters / (point.tensor * point.pipeline)
        states = paper_bytes(share, point.stage, ranks.data, group=ranks.group, each=_paper_widths(point.precision))
        return {
            "stage": int(point.stage) if point.stage.isdigit() else point.stage,
            "tiers": "auto"
            if point.auto
            else {
                "optimizer": point.tiers.optimizer.value,
                "gradients": point.tiers.gradients.value,
                "parameters": point.tiers.parameters.value,
            },
            "group": ranks.group if _has_groups(point.stage) else None,
            "micro_batch": point.micro_batch,
            "accumulate": point.accumulate,
            "checkpoint_every": point.checkpoint_every,
            "tensor": point.tensor,
            "pipeline": point.pipeline,
            "precision": point.precision,
            "parameters_bytes": round(states.parameters),
            "gradients_bytes": round(states.gradients),
            "optimizer_bytes": round(states.optimizer),
            "model_state_bytes": round(states.total),
            "comm_elements_per_psi": elements_sent(point.stage, ranks.data, group=ranks.group),
            "held_bytes": dict(memory.device),
            "host_bytes": dict(memory.host),
            "disk_bytes": dict(memory.disk),
            "device_peak_bytes": memory.device_peak,
            "device_need_bytes": memory.device_need,
            "peak_at": memory.peak_at,
            "fits": found.fits,
            "lacks": found.lacks,
            "sent": [
                {"collective": name, "group": group, "elements": elements, "bytes": found.traffic.bytes[name, group]}
                for (name, group), elements in found.traffic.elements.items()
            ],
            "step_seconds": times.step,
            "compute_seconds": times.compute,
            "update_seconds": times.update,
            "exposed_seconds": dict(times.exposed),
            "efficiency": times.efficiency,
            "arithmetic_intensity": dict(times.intensity),
            "bottleneck": times.bottleneck,
            "samples_per_second": found.samples_per_second,
        }

    def text(self, *, width: int = 100) -> str:
        """Tables and sentences for a person."""
        return plan_text(self, width=width)


def _has_groups(stage: str) -> bool:
    placed = row(stage)
    return placed.copy is not None or placed.reduces_across


def _paper_widths(precision: str) -> StateBytes:
    """16-bit: 2 + 2 + 12. In fp32 there is no second master: 4 + 4 + 8."""
    widths = widths_of(precision)
    return StateBytes(widths.compute, widths.compute, widths.moments + (widths.master if widths.has_master else 0))


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
    precision: str = "bf16",
    flash: bool = True,
    group: int = 0,
    device_memory: int | None = None,
    host_memory: int | None = None,
    disk: int | None = None,
) -> Plan:
    """Bytes, traffic and time of every row of the table, with and without offloading, and one to choose.

    model         a Hugging Face folder or config.json; or a `ModelShape`
    params        instead: a number of parameters, of which a GPT of usual proportions is made
    layers, hidden, heads, vocab, seq
                  instead: the numbers of a GPT
    function      instead: "module:function" that builds a model, or a model and an example of its inputs
    machine       the name of a preset, or a `Machine`; the other arguments change it

    >>> import zerofold as zf
    >>> found = zf.plan(params=7.5e9, world_size=64)
    >>> [round(row["model_state_bytes"] / 1e9, 1) for row in found.to_dict()["stages"][:4]]
    [120.0, 31.4, 16.6, 1.9]
    >>> found.recommended.fits
    True
    """
    for name, number in (("micro_batch", micro_batch), ("accumulate", accumulate)):
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    if checkpoint_every < 0:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be 0 (keep everything) or more")
    fleet = _machine(machine, world_size, gpus_per_node, device_memory, host_memory, disk)

    def make(length: int | None) -> ModelShape:
        numbers = Numbers(layers, hidden, heads, vocab, length)
        return _model(model, params, numbers, function, precision, flash, (checkpoint_every,))

    shape = make(seq)
    wanted = Point(
        micro_batch=micro_batch,
        accumulate=accumulate,
        checkpoint_every=checkpoint_every,
        precision=precision,
        group=group,
    )
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
        _search(shape, fleet, precision),
        _paper(shape, wanted),
        make if shape.source in ("count", "shape") else None,
    )


def _search(model: ModelShape, machine: Machine, precision: str) -> Searched:
    """Tensor and pipeline degrees are among what is searched; what the larger model needs is looked for without them,
    since the engine has none."""
    if not model.activities:
        return Searched()
    result = search(model, machine, precision=precision)
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
        )
    if layers is None or hidden is None or heads is None:
        missing = [n for n, v in (("layers", layers), ("hidden", hidden), ("heads", heads)) if v is None]
        raise ValueError(f"a model given by its numbers needs layers, hidden and heads; add {' and '.join(missing)}")
    size = GPTNumbers(layers=layers, hidden=hidden, heads=heads, vocab=vocab or VOCABULARY, seq=seq or SEQUENCE)
    return from_numbers(size, precision=precision, flash=flash, checkpoint_every=checkpoint_every)


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
