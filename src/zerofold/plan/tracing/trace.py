"""`trace`: from a model and an example of its input to its `ModelShape`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import nn

from zerofold.entry import Entry
from zerofold.memory.buffers import default_buffer_bytes
from zerofold.nested import tensors_in
from zerofold.plan.shape import Activity, ModelShape, Moment, UnitShape
from zerofold.plan.tracing.answers import Answers
from zerofold.plan.tracing.moments import Stretch, fit, line_through, logits_of, moments, read
from zerofold.plan.tracing.recording import Recording
from zerofold.plan.tracing.running import Loss, record
from zerofold.plan.tracing.shadow import Shadow
from zerofold.precision import Precision, policy_of
from zerofold.units import UnitChoice

FITTED = (2, 3)
"""Batches that lines are drawn through. A batch of one lets torch take shapes for others (a dimension of one can be
skipped), so it is looked at afterwards: how far it is off the line is noted."""
NOTED = 0.01
ROUNDING = 2**20
"""Bytes that are not worth a note: the allocator rounds, and small tensors more so."""


def trace(
    model: nn.Module,
    example: Any,
    *,
    units: UnitChoice = None,
    checkpoint_every: Sequence[int] = (0, 1),
    precision: str | Precision | None = "bf16",
    device_like: str = "cuda",
    loss: Loss | None = None,
    buffer_bytes: int | None = None,
    name: str | None = None,
) -> ModelShape:
    """What a model's forward and backward take on a device, without one and without memory for the model.

    The model may be anywhere, on the meta device too, and is left alone. `example` is what a call of it takes: a dict
    of keyword arguments, a tuple, or a tensor; their first dimension is the batch, of any size. `device_like` is
    "cuda" or "cpu": whose kernels and whose allocator. `loss` makes a number of what the model returns, where that
    holds none; `buffer_bytes` is what `zf.prepare` is given.

    For each of `checkpoint_every` one `Activity` comes out: 0 keeps everything, k keeps every k-th block's input. A
    model that checkpoints by itself is followed as it is, and has that one only, as interval 1.

    >>> import torch
    >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(3)))
    >>> shape = trace(model, torch.ones(1, 8, 64), device_like="cpu", precision="fp32", checkpoint_every=[0])
    >>> [(unit.name, unit.count, unit.trained) for unit in shape.units]
    [('', 1, 0), ('0', 3, 4160)]
    >>> peak = max(shape.activities[0].moments, key=lambda moment: moment.alive.at(10))
    >>> peak.phase.value, peak.alive.each
    ('backward', 12288)
    """
    if device_like not in ("cuda", "cpu"):
        raise ValueError(f"device_like={device_like!r} is not known; choose cuda or cpu")
    policy = policy_of(precision)
    shadow = Shadow(model, units, policy)
    shapes, groups = _unit_shapes(shadow)
    notes: list[str] = []
    activities: dict[int, Activity] = {}
    answers = Answers()
    for interval in checkpoint_every:
        if interval < 0:
            raise ValueError(f"checkpoint_every has {interval}; give 0 (keep everything) or a number of blocks")
        shadow = Shadow(model, units, policy)
        keepers = shadow.checkpoint_every(interval) if interval else []

        def run(samples: int, shadow: Shadow = shadow, keepers: list[nn.Module] = keepers) -> Recording:
            return record(
                shadow,
                example,
                samples,
                policy=policy,
                device=device_like,
                keepers=keepers,
                loss=loss,
                buffer_bytes=buffer_bytes or default_buffer_bytes(device_like),
                answers=answers,
            )

        recordings = [run(samples) for samples in (*FITTED, 1)]
        if recordings[0].recomputes and not interval:
            notes.append("the model recomputes blocks by itself; it was followed as it is")
            activities = {1: _activity(1, recordings, model, groups, notes)}
            break
        activities[interval] = _activity(interval, recordings, model, groups, notes)
    config = getattr(model, "config", None)
    first = next(tensor for tensor in tensors_in(example) if tensor.dim())
    return ModelShape(
        name=name or type(model).__name__,
        units=tuple(shapes),
        activities=tuple(activities.values()),
        tokens=first.shape[1] if first.dim() == 2 else 1,
        source="function",
        layers=len(shadow.units) or None,
        hidden=getattr(config, "hidden_size", None),
        heads=getattr(config, "num_attention_heads", None),
        vocab=_vocabulary(model),
        buffers=sum(buffer.nbytes for buffer in shadow.model.buffers()),
        notes=tuple(dict.fromkeys(notes)),
    )


def _activity(
    interval: int, recordings: Sequence[Recording], model: nn.Module, groups: Sequence[int], notes: list[str]
) -> Activity:
    vocabulary = _vocabulary(model)
    smaller, larger, single = (read(recording, vocabulary) for recording in recordings)
    notes.extend(recordings[0].notes)
    fitted = fit(smaller, larger, FITTED)
    if fitted is None:
        raise ValueError(
            f"{type(model).__name__} does not do the same for {FITTED[0]} samples as for {FITTED[1]}, so what it takes "
            "for others cannot be told from them: its shapes must not depend on the batch but in its first dimension, "
            "and no block may be skipped at random (layerdrop)"
        )
    result = moments(fitted, groups)
    _check_single(single, result, interval, notes)
    low, high = (recording.kept_inputs for recording in recordings[:2])
    return Activity(
        checkpoint_every=interval,
        moments=result,
        checkpoints=line_through(low, high, FITTED),
        logits=logits_of(fitted, FITTED[1]),
    )


def _check_single(single: Sequence[Stretch], fitted: Sequence[Moment], interval: int, notes: list[str]) -> None:
    expected = max(moment.alive.at(1) + (moment.gradients or 0) + moment.sent for moment in fitted)
    found = max(instant.total for stretch in single for instant in stretch.instants)
    if abs(found - expected) > max(NOTED * expected, ROUNDING):
        notes.append(
            f"checkpoint_every={interval}: one sample alone takes {found / expected - 1:+.1%} of what the line through "
            f"batches of {FITTED[0]} and {FITTED[1]} says"
        )


def _unit_shapes(shadow: Shadow) -> tuple[list[UnitShape], list[int]]:
    """Equal units after each other are one shape; and for each unit, the root first, the number of its shape."""
    shapes, groups = [_shape("", shadow.entries[""])], [0]
    named = [_shape(name, shadow.entries[name]) for name in shadow.units]
    for _, row in groupby(named, key=lambda shape: (shape.frozen, shape.tensors, shape.name.rpartition(".")[0])):
        same = list(row)
        groups += [len(shapes)] * len(same)
        first = same[0]
        shapes.append(
            UnitShape(
                name=first.name,
                trained=first.trained,
                frozen=first.frozen,
                count=len(same),
                tensors=first.tensors,
            )
        )
    return shapes, groups


def _shape(name: str, entries: Sequence[Entry]) -> UnitShape:
    trained = tuple(entry.parameter.numel() for entry in entries if entry.parameter.requires_grad)
    frozen = sum(entry.parameter.numel() for entry in entries if not entry.parameter.requires_grad)
    return UnitShape(name=name, trained=sum(trained), frozen=frozen, tensors=trained)


def _vocabulary(model: nn.Module) -> int | None:
    """Of a language model: how many tokens its largest table knows."""
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(tables, default=None)
