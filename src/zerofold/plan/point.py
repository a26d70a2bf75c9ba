"""One way to train a model on a machine, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from zerofold.placement import Tier, Tiers


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of the space that `search` looks through."""

    stage: str = "3"
    group: int = 0
    """Ranks inside a group, of hsdp and hpz; 0: those of a node."""
    tiers: Tiers = field(default_factory=Tiers)
    """Of every unit. Where `auto` is set, each unit's are chosen by `zerofold.offload.plan.place`."""
    auto: bool = False
    part: float = 1.0
    """Of the elements, those of the last units: these have `tiers`, and the first units stay on the device."""
    micro_batch: int = 1
    accumulate: int = 1
    checkpoint_every: int = 0
    checkpoints_on: str = "device"
    """Where the inputs of checkpointed blocks wait: "device", "host" or "nvme"; see docs/activation.md."""
    partition: bool = False
    """P_a: each tensor-parallel rank keeps its part of those inputs. Sequence-parallel norms leave nothing to cut."""
    tensor: int = 1
    sequence_parallel: bool = False
    """Norms, and what goes from block to block, are cut along the sequence by the tensor-parallel ranks."""
    loss_parallel: bool = False
    """Logits stay cut over the vocabulary by them."""
    pipeline: int = 1
    schedule: str = "1f1b"
    """Of the pipeline: "gpipe", "1f1b", "interleaved", "zero_bubble" or "zbv"."""
    chunks: int = 0
    """Runs of blocks on a rank, with schedule="interleaved" (0: two) or "zero_bubble" (0: one)."""
    precision: str = "bf16"
    live_bytes: int | None = None
    """Bound on what is gathered at once; None: the root and two blocks."""
    on_meta: bool = True
    """The model is built on the meta device, and gets memory unit by unit; else all of it is on the device before."""
    buffer_bytes: int = 0
    """As `zf.prepare` takes it; 0: what it takes by itself on such a device."""
    contiguous_gradients: bool = False
    """M_d: gradients on the device lie in one block, which is there before the first forward."""
    contiguous_checkpoints: bool = False
    """M_d: so do inputs of checkpointed blocks that wait on the device."""

    @property
    def samples(self) -> int:
        """Of a data-parallel rank in a step."""
        return self.micro_batch * self.accumulate

    @property
    def is_away(self) -> bool:
        """Something of it leaves the device: states, or the inputs of checkpointed blocks."""
        return self.auto or self.tiers.is_offloaded or self.keeps_away

    @property
    def keeps_away(self) -> bool:
        return bool(self.checkpoint_every) and self.checkpoints_on != "device"

    @property
    def keeps_a_block(self) -> bool:
        """Inputs of checkpointed blocks lie in one block of the device, which stays after them; parts always do."""
        is_here = bool(self.checkpoint_every) and not self.keeps_away
        return is_here and (self.contiguous_checkpoints or self.keeps_parts)

    @property
    def keeps_parts(self) -> bool:
        """P_a has something to cut."""
        return self.partition and self.tensor > 1 and bool(self.checkpoint_every) and not self.sequence_parallel


def name_of(point: Point) -> str:
    """
    >>> name_of(Point(stage="3", tiers=Tiers(Tier.HOST, Tier.HOST)))
    'stage 3, optimizer and gradients on the host'
    """
    label = f"stage {point.stage}" if point.stage.isdigit() else point.stage
    where = f" of {100 * point.part:.0f}% of the units" if point.part < 1 else ""
    if point.auto:
        return ", ".join([f"{label}, tiers chosen unit by unit", *_checkpoints_in_words(point)])
    tiers = {
        "optimizer": point.tiers.optimizer,
        "gradients": point.tiers.gradients,
        "parameters": point.tiers.parameters,
    }
    parts = []
    for tier, place in _PLACES.items():
        states = [state for state, held in tiers.items() if held is tier]
        if states:
            named = " and ".join([", ".join(states[:-1]), states[-1]] if len(states) > 1 else states)
            parts.append(f"{named}{where} {place}")
    return ", ".join([label, *parts, *_checkpoints_in_words(point)])


_PLACES = {Tier.HOST: "on the host", Tier.NVME: "on disk"}


def _checkpoints_in_words(point: Point) -> list[str]:
    if not (point.keeps_away or point.keeps_parts):
        return []
    where = f" {_PLACES[Tier(point.checkpoints_on)]}" if point.keeps_away else ""
    return [f"checkpoints{' in parts' if point.keeps_parts else ''}{where}"]


def degrees_in_words(point: Point) -> str:
    """
    >>> degrees_in_words(Point(tensor=2, pipeline=4, accumulate=8)), degrees_in_words(Point())
    ('tensor 2, pipeline 4 (1f1b)', '')
    """
    parts = []
    if point.tensor > 1:
        more = [
            name
            for name, is_on in (
                ("sequence-parallel norms", point.sequence_parallel),
                ("logits cut", point.loss_parallel),
            )
            if is_on
        ]
        parts.append(f"tensor {point.tensor}" + (f" ({', '.join(more)})" if more else ""))
    if point.pipeline > 1:
        parts.append(f"pipeline {point.pipeline} ({point.schedule})")
    return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank, by line; every line is one that the ledger can measure. `device_peak` is not their sum: not
    all of them are there at once."""

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    device_peak: int = 0
    peak_at: str = ""
    """In which moment: "backward of block.7", "step"."""
    gradient_arena: int = 0
    """Of the gradients: what lies in one block, with what rounds each slab up in it."""
    reserve: int = 0
    """Kept free besides the peak: memory between tensors that none of them can use."""
    sums: int = 0
    """Of the gradients: whole sums of micro-batches, beside those that the optimizer reads."""
    waiting: int = 0
    """Of the local gradients: whole sums of micro-batches beside gradients that are elsewhere, or of a pipeline."""
    shares: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of the elements of gradients and parameters, those on the host and on the disk."""

    @property
    def device_need(self) -> int:
        """What a device must have."""
        return self.device_peak + self.reserve

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer on the device."""
        return sum(self.device.get(line, 0) for line in ("parameters", "gradients", "optimizer"))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a rank sends in a step, as a ring would: by collective, and by whom it goes to ("all", "inside", …)."""

    elements: dict[tuple[str, str], float]
    bytes: dict[tuple[str, str], float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a step, by what they are spent on; what is hidden behind something else is not among them."""

    compute: float
    exposed: dict[str, float]
    """"gather", "reduce", "host", "disk", "pipeline", "tensor": what the device waits for."""
    update: float
    efficiency: float
    """By the model of arithmetic intensity."""
    intensity: dict[str, float]
    bottleneck: str

    @property
    def step(self) -> float:
        return self.compute + sum(self.exposed.values()) + self.update


@dataclass(frozen=True, kw_only=True)
class Prediction:
    point: Point
    memory: Memory
    traffic: Traffic
    times: Times
    fits: bool
    lacks: str = ""
    """Which memory is too small, and by how much."""
    samples_per_second: float = 0.0
    """Of all devices together."""
