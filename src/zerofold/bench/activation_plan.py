"""What the plan says of the runs of `zerofold bench activation`, and the length that it finds for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from zerofold.bench.gpt import GPT, Block, GPTSize
from zerofold.bench.plan_predicted import BUFFER_BYTES, machine_of
from zerofold.plan.memory import memory
from zerofold.plan.point import Point
from zerofold.plan.shape import ModelShape, Phase
from zerofold.plan.tracing import trace
from zerofold.plan.transformer import GPTNumbers, PaperBytes

PRECISION = "bf16"
OVER, UNDER = 1.06, 0.92
"""Of the device's memory: what checkpoints on the device must need at a length that is to run out of memory, and what
checkpoints on the host may."""
GRAIN = 256


def traced(size: GPTSize, length: int, device: str, *, loss_tokens: int | None) -> ModelShape:
    """The model on sequences of this length, with a checkpoint at every block."""
    with torch.device("meta"):
        model = GPT(size, loss_tokens=loss_tokens)
        tokens = torch.zeros(1, length, dtype=torch.long)
    return trace(
        model,
        {"tokens": tokens, "targets": tokens},
        units=Block,
        checkpoint_every=[1],
        precision=PRECISION,
        device_like=device,
        buffer_bytes=BUFFER_BYTES[device],
        name="gpt",
    )


def peak_bytes(shape: ModelShape, batch: int, keep: str, device: str, *, contiguous: bool = False) -> int:
    """Of a rank alone, by the function that `zerofold plan` shows."""
    point = Point(
        stage="3",
        micro_batch=batch,
        checkpoint_every=1,
        checkpoints_on=keep,
        contiguous_checkpoints=contiguous,
        precision=PRECISION,
        buffer_bytes=BUFFER_BYTES[device],
    )
    return memory(shape, machine_of(device, 1, None), point).device_peak


class Working(NamedTuple):
    """Bytes of the activations that are no checkpoints, at their most."""

    traced: float
    formula: float


def working_bytes(size: GPTSize, shape: ModelShape, batch: int) -> Working:
    """Traced, with the one gradient of a parameter that is there while it is made, and by the paper's formula."""
    activity = shape.activity(1)
    largest = {0: size.vocab * size.width * 2}  # the head's; of a block, that of the MLP
    block = 4 * size.width**2 * 2
    alive = max(
        moment.alive.at(batch) + (largest.get(moment.unit, block) if moment.phase is Phase.BACKWARD else 0)
        for moment in activity.moments
    )
    return Working(alive - activity.checkpoints.at(batch), paper(size, batch, 1).activation_working)


def paper(size: GPTSize, batch: int, every: int) -> PaperBytes:
    numbers = GPTNumbers(layers=size.layers, hidden=size.width, heads=size.heads, vocab=size.vocab, seq=size.seq)
    return numbers.paper(batch, every)


def find_length(peak: Callable[[int, str], float], capacity: float, longest: int) -> int:
    """A length whose checkpoints do not fit the device and whose step fits without them.

    peak      the predicted bytes of a length, its checkpoints on the "device" or on the "host"
    longest   that the model can take

    >>> find_length(lambda length, keep: 40e9 + length * (4e6 if keep == "device" else 2e6), 100e9, 65536)
    16640
    """
    low, high = longest // 2, longest
    at_low, at_high = peak(low, "device"), peak(high, "device")
    slope = (at_high - at_low) / (high - low)
    wanted = low + (OVER * capacity - at_low) / slope
    length = -int(-wanted // GRAIN) * GRAIN
    if not 0 < length <= longest:
        raise ValueError(
            f"checkpoints of {longest} tokens need {at_high / 2**30:.1f} GiB of {capacity / 2**30:.1f} on the device: "
            "no length that this model takes runs out of memory; give a larger one"
        )
    needed = peak(length, "host")
    if needed > UNDER * capacity:
        raise ValueError(
            f"{length} tokens, too many with checkpoints on the device, need {needed / 2**30:.1f} GiB of "
            f"{capacity / 2**30:.1f} without them too: give a model of more layers"
        )
    return length
