"""What the plan knows of a model: units of equal blocks, and what is alive while each of them computes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

ROOT = ""
"""The unit of whatever is in no block: embeddings, the last norm, the head."""


def in_short(count: float, digits: int = 3) -> str:
    """
    >>> [in_short(count) for count in (29, 1000, 6_669_000, 7.5e9, 1e15)]
    ['29', '1K', '6.67M', '7.5B', '1000T']
    """
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.{digits + (count >= 1e15)}g}{name}"
    return f"{count:g}"


@dataclass(frozen=True)
class PerSample:
    """A number that grows with the micro-batch.

    >>> PerSample(10, 3).at(4), (PerSample(1, 2) + PerSample(3, 4)).at(1)
    (22, 10)
    """

    fixed: float = 0
    each: float = 0

    def at(self, samples: float) -> float:
        return self.fixed + self.each * samples

    def __add__(self, other: PerSample) -> PerSample:
        return PerSample(self.fixed + other.fixed, self.each + other.each)


@dataclass(frozen=True)
class Work:
    """What a device does: matrix arithmetic, bytes that other kernels read and write, kernels started."""

    flops: PerSample = PerSample()
    moved: PerSample = PerSample()
    kernels: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.moved + other.moved, self.kernels + other.kernels)


@dataclass(frozen=True, kw_only=True)
class UnitShape:
    """A unit, and how many like it follow each other.

    `tensors` are the elements of each trained parameter, where they are known: with them the padding of the flat
    layout is exact. So are `frozen_tensors` of the others.
    """

    name: str
    trained: int
    frozen: int = 0
    count: int = 1
    tensors: tuple[int, ...] = ()
    frozen_tensors: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Of one of them."""
        return self.trained + self.frozen


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"  # with the recomputation of what was checkpointed


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A stretch of a step in which one unit computes.

    `alive` is the most that activations and temporaries take at any time in it: no parameters, no gradients of
    parameters. Of `repeats` equal stretches after each other each leaves `growth` more (less, in backward) than it
    found, and `alive` is that of the largest.
    """

    phase: Phase
    unit: int
    """Its number in `ModelShape.units`."""
    alive: PerSample
    work: Work
    repeats: int = 1
    growth: PerSample = PerSample()
    gradients: float | None = None
    """Bytes of parameters' gradients beside `alive`: as autograd makes them, until their slab has all of its own. Of a
    traced model, at the instant when all is most; None where nobody looked: a whole unit's may be there then."""
    sent: float = 0
    """And of complete slabs that are still on their way to other ranks, where there are any: see `zerofold.reduce`."""
    arrived: float = 0
    """And of all slabs that are complete, for a rank alone, which keeps them so. Each of `repeats` finds its unit's
    gradients more than the one before."""


@dataclass(frozen=True, kw_only=True)
class Activity:
    """A forward and backward of one micro-batch, every `checkpoint_every`-th block's input kept (0: everything)."""

    checkpoint_every: int
    moments: tuple[Moment, ...]
    checkpoints: PerSample = PerSample()
    """Of `alive` at the end of forward: the inputs kept for recomputation."""
    logits: PerSample = PerSample()
    """Of `alive` at its largest: the logits, their fp32 copy and their gradient."""


@dataclass(frozen=True, kw_only=True)
class Launching:
    """What one step of a model took the host, measured (`zerofold.plan.probe`). Not how long the device computed."""

    checkpoint_every: int
    samples: int
    """Of the step."""
    forward: float
    backward: float
    """Seconds until all of it was launched, with what is computed again."""
    update: float
    """Seconds until the optimizer's step was launched, which reads the gradients' norm first."""
    clear: float
    """Seconds of `zero_grad`, which may be spent while the device updates."""
    drained: float = 0.0
    """Seconds that the device still computed when backward had been launched: where the host was ahead."""
    settled: float = 0.0
    """Seconds from an idle device until it is through with the update, and its gradients are cleared: the device's part
    is in it. The batch has none in it. 0 where nobody looked."""
    ahead: float = 0.0
    """How much of `settled` goes before the norm of the gradients is read: beside a device that is still in backward,
    where the host is ahead of it."""
    waits: int = 0
    """How often forward and backward made the host wait for the device: the values of tensors were asked for."""

    @property
    def passes(self) -> float:
        return self.forward + self.backward

    def fastest(self, other: Launching) -> Launching:
        """The passes of the one, and the update of the one, that took less."""
        passes = min(self, other, key=lambda each: each.passes)
        update = min(self, other, key=lambda each: each.settled or each.update + each.clear)
        return replace(passes, update=update.update, clear=update.clear, settled=update.settled, ahead=update.ahead)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model as the plan sees it. `units` in forward order; what is in no block is the first, named ROOT."""

    name: str
    units: tuple[UnitShape, ...]
    activities: tuple[Activity, ...] = ()
    """One for each interval of checkpoints that was traced or computed; none where only parameters are known."""
    tokens: int = 1
    """Of a sample: the length of its sequence, or the patches of a picture."""
    source: str = "count"
    """"count", "shape", "config" or "function"; the last two are traced."""
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocab: int | None = None
    built_bytes: int = 4
    """Of an element, as the model's code builds it."""
    buffers: int = 0
    """Bytes of the model's buffers, which every rank has whole."""
    notes: tuple[str, ...] = field(default=())
    """What was assumed, for a person to read."""
    launched: tuple[Launching, ...] = ()
    """What the host took for it, where that was measured."""

    @property
    def parameters(self) -> int:
        return sum(unit.count * unit.parameters for unit in self.units)

    @property
    def trained(self) -> int:
        return sum(unit.count * unit.trained for unit in self.units)

    def activity(self, checkpoint_every: int) -> Activity:
        for found in self.activities:
            if found.checkpoint_every == checkpoint_every:
                return found
        known = ", ".join(str(each.checkpoint_every) for each in self.activities) or "none"
        raise ValueError(f"{self.name}: nothing is known of checkpoint_every={checkpoint_every}; known: {known}")

    def launching(self, checkpoint_every: int) -> Launching | None:
        """With or without recomputation: every block is computed again, however many of them from one input."""
        return next((each for each in self.launched if bool(each.checkpoint_every) == bool(checkpoint_every)), None)
