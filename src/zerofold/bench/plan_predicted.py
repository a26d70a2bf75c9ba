"""What `zerofold bench plan` expects of one run: the peak of the device and the seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zerofold.placement import row
from zerofold.plan.shape import ModelShape, Phase
from zerofold.precision import policy_of
from zerofold.prepare import DEFAULT_BUFFER_BYTES

WORKSPACES = 2 * 2**25
"""Bytes of the matrix library on a GPU: one workspace for the thread that runs forward, one for autograd's."""
IN_FLIGHT = 2
"""Chunks of gradients on the wire at once, as in `zerofold.reduce`."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured setting of a model."""

    stage: int
    world: int
    batch: int
    checkpointing: bool


class Rates(NamedTuple):
    """What a device reaches: flops and bytes a second, and seconds to start a kernel."""

    flops: float
    memory: float
    kernel: float


def peak_bytes(shape: ModelShape, run: Run, precision: str, device: str) -> int:
    """States, what is gathered, fused buffers, and at the largest instant activations and gradients beside them.

    A rank alone keeps gradients as autograd made them: they come while activations go.
    """
    placed, alone = row(run.stage), run.world == 1
    dtypes = policy_of(precision).parameters
    compute = 4 if dtypes is None else dtypes.itemsize
    has_master = compute != 4
    numel = shape.parameters
    share = run.world if placed.optimizer.is_cut else 1
    is_whole = not placed.parameters.is_cut and not alone
    states = numel * (8 + 4 * has_master) / share
    if not has_master:
        states += 4 * numel / (run.world if placed.parameters.is_cut else 1)
    elif is_whole:
        states += compute * numel
    largest = max((unit.parameters for unit in shape.units[1:]), default=0)
    gathers = not is_whole and (has_master or not alone)
    gathered = compute * (shape.units[0].parameters + 2 * largest) if gathers else 0
    in_place = not placed.optimizer.is_cut and not has_master  # gradients are reduced in the flat space they stay in
    base = states + gathered + shape.buffers + (WORKSPACES if device == "cuda" else 0)
    if not alone:
        base += 4 * numel / share + (0 if in_place else _buffers(shape, share))
    most = compute * numel if alone else 0.0  # when the update begins
    for moment in shape.activity(int(run.checkpointing)).moments:
        first = moment.alive.at(run.batch) + (moment.gradients or 0)
        first += moment.arrived if alone else 0 if in_place else moment.sent
        most = max(most, first)
        if moment.phase is Phase.BACKWARD and alone:
            come = compute * shape.units[moment.unit].trained
            most = max(most, first + (moment.repeats - 1) * (come - moment.growth.at(run.batch)))
    return round(base + most)


def _buffers(shape: ModelShape, share: int) -> float:
    """Bytes that the pool of fused buffers grows to: for each chunk on its way what is sent, and this rank's part."""
    root, *blocks = shape.units
    alone = [numel for numel in root.tensors if 4 * numel >= _LARGE]
    largest = max([*alone, root.trained - sum(alone), *(unit.trained for unit in blocks)])
    sent = min(4 * largest, DEFAULT_BUFFER_BYTES)
    return IN_FLIGHT * sent * (1 + 1 / share if share > 1 else 1)


_LARGE = 2**20  # bytes from which a parameter of the root is reduced by itself


def step_seconds(shape: ModelShape, run: Run, precision: str, rates: Rates) -> float:
    """Of a rank alone: arithmetic and bytes of every kernel, or the host that starts them; then the update."""
    moments = shape.activity(int(run.checkpointing)).moments
    busy = sum(
        moment.repeats * (moment.work.flops.at(run.batch) / rates.flops + moment.work.moved.at(run.batch) / rates.memory)
        for moment in moments
    )
    started = rates.kernel * sum(moment.repeats * moment.work.kernels for moment in moments)
    # Gradient, master and moments are read, the last two written; masters are cast for forward and for backward.
    update = shape.parameters * (26 if precision == "bf16" else 28)
    casts = shape.parameters * 2 * 6 if precision == "bf16" else 0
    return max(busy, started) + (update + casts) / rates.memory
