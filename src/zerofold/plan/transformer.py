"""A GPT by its numbers: parameters, and what is alive while each block computes, counted tensor by tensor.

What a block keeps for its backward, in numbers for each token, of width h:

    input of the first norm h, its output h, query, key and value 3h, attention's output h,
    input of the second norm h, its output h, before and after the MLP's activation 4h + 4h         together 16h

and attention's weights, heads × seq, where they are kept: flash attention computes them again. Checkpointed, of every
`ci` blocks the first one's input is kept, and the rest while its backward runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from zerofold.plan.held import widths_of
from zerofold.plan.shape import ROOT, Activity, ModelShape, Moment, PerSample, Phase, UnitShape, Work, in_short

KEPT = 16
"""Numbers that a block keeps for each token and each of its hidden width."""
BACKWARD = 5
"""More of them at once in its backward: the gradient that comes in, and that of the MLP's inside, while the MLP's own
activations are still there."""
NO_GRAPH = 11
"""At once in a forward that keeps nothing: two inputs, a norm, the MLP's inside twice."""
LOGIT_BYTES = 12
"""Of one logit in the loss's backward: log-probabilities, their gradient and that of the logits, all fp32."""
ASPECT = 128
"""Hidden width by layers, as in GPT-3 and most models since."""
VOCABULARY, SEQUENCE = 50304, 2048
LARGEST_PARAMETERS = 1e15
_DIVISIBLE = ((1e13, 80), (2e10, 8))  # from so many parameters on: layers and heads are multiples of that


class PaperBytes(NamedTuple):
    """The memory model of ZeRO-Infinity's section 3, as published."""

    parameters: float
    activation_checkpoints: float
    activation_working: float
    model_state_working: float


@dataclass(frozen=True, kw_only=True)
class GPTNumbers:
    """The sizes of a GPT.

    >>> GPTNumbers(layers=48, hidden=1600, heads=25, vocab=50257, seq=1024).parameters
    1557611200
    """

    layers: int
    hidden: int
    heads: int
    vocab: int = VOCABULARY
    seq: int = SEQUENCE

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} does not divide into heads={self.heads}; choose a divisor")

    @property
    def block(self) -> tuple[int, ...]:
        """Weights and biases, as in GPT-2."""
        h = self.hidden
        return (h, h, 3 * h * h, 3 * h, h * h, h, h, h, 4 * h * h, 4 * h, 4 * h * h, h)

    @property
    def root(self) -> tuple[int, ...]:
        """Tokens, which the head shares, positions, the last norm."""
        return (self.vocab * self.hidden, self.seq * self.hidden, self.hidden, self.hidden)

    @property
    def parameters(self) -> int:
        return self.layers * sum(self.block) + sum(self.root)

    def paper(self, samples: int, checkpoint_every: int) -> PaperBytes:
        return paper_of(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            seq=self.seq,
            samples=samples,
            checkpoint_every=checkpoint_every,
        )


def paper_of(*, layers: int, hidden: int, heads: int, seq: int, samples: int, checkpoint_every: int) -> PaperBytes:
    """12·nl·hd² parameters; 2·bsz·seq·hd·nl/ci, bsz·seq·ci·(16·hd + 2·heads·seq) and 4·hd·4hd bytes. Heads need not
    divide the width, as mT5's do not.

    >>> found = paper_of(layers=80, hidden=10000, heads=100, seq=1024, samples=32, checkpoint_every=1)
    >>> found.activation_checkpoints / 1e9
    52.4288
    """
    every = checkpoint_every or 1
    return PaperBytes(
        12 * layers * hidden**2,
        2 * samples * seq * hidden * layers / every,
        samples * seq * every * (16 * hidden + 2 * heads * seq),
        4 * hidden * 4 * hidden,
    )


def from_numbers(
    size: GPTNumbers, *, precision: str = "bf16", flash: bool = True, checkpoint_every: tuple[int, ...] = ()
) -> ModelShape:
    """`checkpoint_every`: intervals to know besides none, every block and powers of two."""
    return _shape(size, f"GPT of {in_short(size.parameters)} parameters", precision, flash, checkpoint_every)


def from_parameters(
    count: float,
    *,
    seq: int = SEQUENCE,
    vocab: int | None = None,
    precision: str = "bf16",
    flash: bool = True,
    checkpoint_every: tuple[int, ...] = (),
    divisor: int = 1,
) -> ModelShape:
    """A GPT of usual proportions with just so many parameters; `divisor`: of its heads, which tensor ranks share.

    >>> model = from_parameters(7.5e9)
    >>> model.parameters, model.layers, model.hidden
    (7500000000, 32, 4352)
    >>> large = from_parameters(70e9)
    >>> large.layers, large.hidden, large.heads
    (72, 9216, 72)
    >>> [from_parameters(7e9, divisor=each).heads for each in (1, 2, 8)]
    [33, 32, 32]
    """
    if not isinstance(count, int | float):
        raise TypeError(f"params={count!r} must be a number of parameters, such as 7.5e9")
    if not 1e3 <= count <= LARGEST_PARAMETERS:
        raise ValueError(f"--params {count:g} is out of range; give a number from 1e3 to {LARGEST_PARAMETERS:g}")
    total = int(count)
    step = 128 if count >= 1e9 else 64 if count >= 1e7 else 8
    # Large models are cut over tensor and pipeline ranks as well, so heads and layers need divisors.
    many = next((parts for least, parts in _DIVISIBLE if count >= least), 1)
    step *= math.lcm(many, divisor)
    hidden = max(step, round((ASPECT * count / 12) ** (1 / 3) / step) * step)
    # In a small model the usual vocabulary and sequence would be all there is.
    if vocab is not None and vocab * hidden >= total:
        raise ValueError(
            f"vocab={vocab} is a table of {vocab * hidden:,} parameters in a GPT of usual proportions, hidden "
            f"{hidden}, and params={count:g} is all there is; give a smaller vocab=, or layers=, hidden= and heads="
        )
    vocab = vocab or max(16, min(VOCABULARY, int(0.3 * count) // hidden))
    positions = max(1, min(seq, int(0.1 * count) // hidden))
    heads = max(divisor, hidden // (128 if hidden >= 2048 else 64))
    heads = next(number for number in range(heads, 0, -1) if hidden % number == 0 and number % divisor == 0)
    layers = max(1, round((count - vocab * hidden) / (12 * hidden**2) / many)) * many
    size = GPTNumbers(layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=seq)
    shape = _shape(size, f"{in_short(count, 4)} parameters", precision, flash, checkpoint_every)
    each = max(1, (total - min(total // 2, (vocab + positions) * hidden)) // layers)
    units = (
        UnitShape(name=ROOT, trained=total - layers * each),
        UnitShape(name="block", trained=each, count=layers),
    )
    note = (
        f"a GPT of usual proportions was assumed: {layers} layers, hidden {hidden}, {heads} heads, vocabulary {vocab}, "
        f"sequence {seq}"
    )
    return ModelShape(
        name=shape.name,
        units=units,
        activities=shape.activities,
        tokens=seq,
        source="count",
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        notes=(note, *shape.notes),
    )


def _shape(size: GPTNumbers, name: str, precision: str, flash: bool, more: tuple[int, ...]) -> ModelShape:
    powers = [1 << power for power in range(20) if 1 << power < size.layers]
    intervals = sorted({0, 1, *powers, *(each for each in more if each <= size.layers)})
    what = "are computed again in backward (flash attention)" if flash else "are kept"
    return ModelShape(
        name=name,
        units=(
            UnitShape(name=ROOT, trained=sum(size.root), tensors=size.root),
            UnitShape(name="block", trained=sum(size.block), tensors=size.block, count=size.layers),
        ),
        activities=tuple(activity(size, every, precision=precision, flash=flash) for every in intervals),
        tokens=size.seq,
        source="shape",
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        vocab=size.vocab,
        notes=(f"activations are counted by formula for a GPT-2 block without dropout; attention's weights {what}",),
    )


def activity(size: GPTNumbers, every: int, *, precision: str = "bf16", flash: bool = True) -> Activity:
    """What is alive in each moment, with every `every`-th block's input kept; 0: everything."""
    item, s, h, layers = widths_of(precision).compute, size.seq, size.hidden, size.layers
    stream = s * h * item  # what goes from block to block
    weights = 0 if flash else size.heads * s * s * item
    statistics = 4 * s * (4 + size.heads)  # of two norms, and of attention's rows
    keeps = KEPT * stream + weights + statistics
    logits = s * size.vocab * LOGIT_BYTES
    segments = -(-layers // every) if every else layers
    checkpoints = segments * stream if every else 0
    after_forward = checkpoints if every else layers * keeps
    in_backward = (every or 1) * keeps + BACKWARD * stream + 2 * weights
    left = (checkpoints if every else (layers - 1) * keeps) + in_backward
    growth = stream / every if every else keeps
    forward = after_forward + (NO_GRAPH * stream + weights if every else 2 * stream)
    flops = 24 * s * h * h + 4 * s * s * h  # all of attention, as torch counts; causal, it skips half, more slowly
    recomputed = flops - 8 * s * h * h  # torch stops when all that was kept is there again: before the last product
    head = 2 * s * h * size.vocab
    moved = 1.2 * keeps  # as traces of the same blocks count
    again = 1 if every else 0

    def moment(phase: Phase, unit: int, alive: float, work: Work, repeats: int = 1, grows: float = 0) -> Moment:
        return Moment(
            phase=phase, unit=unit, alive=PerSample(0, alive), work=work, repeats=repeats, growth=PerSample(0, grows)
        )

    def work(flops: float, moved: float, kernels: float) -> Work:
        return Work(PerSample(0, flops), PerSample(0, moved), kernels)

    return Activity(
        checkpoint_every=every,
        moments=(
            moment(Phase.FORWARD, 0, 3 * stream, work(0, 4 * stream, 4)),
            moment(Phase.FORWARD, 1, forward, work(flops, moved, 16), layers, growth),
            moment(Phase.FORWARD, 0, after_forward + 3 * stream + logits, work(head, 1.5 * logits, 6)),
            moment(Phase.BACKWARD, 0, after_forward + 3 * stream + logits, work(2 * head, 2 * logits, 10)),
            moment(
                Phase.BACKWARD,
                1,
                left,
                work(2 * flops + again * recomputed, (2 + again) * moved, 32 + 16 * again),
                layers,
                growth,
            ),
            moment(Phase.BACKWARD, 0, 3 * stream, work(0, 4 * stream, 4)),
        ),
        checkpoints=PerSample(0, checkpoints),
        logits=PerSample(0, logits),
    )
