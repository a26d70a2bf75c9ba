"""The samples of a step, divided into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zerofold.plan.machine import Machine
from zerofold.plan.mesh import mesh_of
from zerofold.plan.pipelining import can_run, check_schedule
from zerofold.plan.point import Point, Prediction
from zerofold.plan.predict import predict
from zerofold.plan.shape import ModelShape
from zerofold.plan.space import divisors


def check_batch(machine: Machine, point: Point, global_batch: int) -> int:
    """The samples of a data-parallel rank in a step, of which at least one division can be run."""
    data = mesh_of(machine, point).data
    if point.micro_batch > 1 or point.accumulate > 1:
        raise ValueError(f"global_batch={global_batch} chooses micro_batch= and accumulate=; leave those out")
    if global_batch < 1 or global_batch % data:
        raise ValueError(
            f"global_batch={global_batch} does not divide among {data} data-parallel ranks; give a multiple of {data}"
        )
    samples = global_batch // data
    check_schedule(replace(point, accumulate=point.pipeline))  # what no number of micro-batches would mend
    if not any(divisions(point, samples)):
        raise ValueError(
            f"global_batch={global_batch} is {samples} samples of a data-parallel rank, and {point.pipeline} stages "
            f"with schedule={point.schedule!r} need as many micro-batches; give at least {point.pipeline * data}, or "
            "use schedule='gpipe'"
        )
    return samples


def divisions(point: Point, samples: int) -> Iterator[Point]:
    """All ways to divide them that the point's pipeline takes, the smallest micro-batch first.

    >>> [each.accumulate for each in divisions(Point(pipeline=4), 12)]
    [12, 6, 4]
    """
    for size in divisors(samples):
        at = replace(point, micro_batch=size, accumulate=samples // size)
        if can_run(at):
            yield at


def divided(model: ModelShape, machine: Machine, point: Point, samples: int) -> Prediction:
    """The fastest that fits, for so many samples of a rank; of equals the larger micro-batch. Where nothing fits, with
    the smallest micro-batches.

    >>> from zerofold.plan.presets import preset
    >>> from zerofold.plan.transformer import from_parameters
    >>> found = divided(from_parameters(7e9), preset("A100-80", devices=8), Point(stage="3", checkpoint_every=1), 64)
    >>> found.fits, found.point.micro_batch * found.point.accumulate
    (True, 64)
    """
    best = None
    for at in divisions(point, samples):
        found = predict(model, machine, at)
        if best is None or (found.fits and (not best.fits or found.times.step <= best.times.step)):
            best = found
    assert best is not None, "check_batch has seen that there is one"
    return best


def in_words(point: Point) -> str:
    """
    >>> in_words(Point(micro_batch=4, accumulate=8)), in_words(Point())
    ('micro-batches of 4 samples, 8 to a step', 'micro-batches of 1 sample, 1 to a step')
    """
    return f"micro-batches of {point.micro_batch} sample{'s' * (point.micro_batch > 1)}, {point.accumulate} to a step"
