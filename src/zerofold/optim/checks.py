"""What can be said against training a model with these optimizers, before anything of either is changed."""

from __future__ import annotations

import torch
from torch import Tensor

from zerofold.comm import Comm
from zerofold.engine import Engine
from zerofold.optim.adam import why_not_one_pass
from zerofold.optim.probe import why_not_by_parameter, why_not_elementwise
from zerofold.optim.step import StepOptions
from zerofold.placement import Tier
from zerofold.sharded import ShardedParameter

_OPTIONS = 3
"""Lines of `told_of_steps` that do not depend on which parameters a rank has."""


def check_optimizers(engine: Engine, optimizers: list[torch.optim.Optimizer], options: StepOptions) -> None:
    """Raises with the name and the fix when these optimizers cannot train this model."""
    _check_options(options, optimizers)
    faces = engine.faces()
    covered = {id(p) for other in engine.optimizers for group in other.param_groups for p in group["params"]}
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if optimizer in engine.optimizers:
            raise ValueError(f"this {type(optimizer).__name__} is already attached to the model")
        check_groups(optimizer, faces)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        covered |= {id(faces[id(p)][1]) for p in held if id(p) in faces}
        check_kind(engine, optimizer)
        _check_one_pass(engine, optimizer, options)
        _check_file(engine, optimizer, options)
    missing = [name for name, face in engine.trained_faces() if id(face) not in covered]
    if missing:
        raise ValueError(
            f"{type(optimizers[0]).__name__} misses {len(missing)} trainable parameter(s), first '{missing[0]}': add "
            "them to a parameter group, attach the optimizer that has them in the same call, or freeze them with "
            "requires_grad_(False) before zerofold sees the model"
        )


def told_of_steps(optimizers: list[torch.optim.Optimizer], options: StepOptions) -> list[str]:
    """What ranks must have alike, for each updates its part of the model: a learning rate that a rank made of its own
    share of the data would train every part in another way."""
    lines = [f"clip={options.clip}", f"clip_value={options.clip_value}", f"one_pass={options.one_pass}"]
    assert len(lines) == _OPTIONS
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            lines.append(f"{type(optimizer).__name__}, group {number}, {len(group['params'])} parameters")
            lines += [f"{key}={value}" for key, value in group.items() if isinstance(value, (int, float))]
    return lines


def check_same_over_the_model(model: Comm | None, lines: list[str], ranks: int) -> None:
    """As `told_of_steps` says them, of those who hold one copy of the model: `ranks` at a time share the inside of
    every layer, and other stages of a pipeline have other parameters.
    """
    everyone = [] if model is None else model.all_gather_objects(lines)
    for index, theirs in enumerate(everyone):
        first = index // ranks * ranks
        pairs = [*zip(everyone[0][:_OPTIONS], theirs, strict=False)]
        pairs += zip([*everyone[first], "nothing more"], [*theirs, "nothing more"], strict=False)
        ours, other = next(((a, b) for a, b in pairs if a != b), ("", ""))
        if model is not None and ours != other:
            raise ValueError(
                f"rank {model.global_ranks[index]} holds a part of one model with others and would train it in another "
                f"way: it has '{other}' where others have '{ours}'; give the same numbers on every rank"
            )


def _check_options(options: StepOptions, optimizers: list[torch.optim.Optimizer]) -> None:
    if options.one_pass not in (None, True, False):
        raise TypeError(f"one_pass={options.one_pass!r} must be True, False, or None to choose by itself")
    for name, what in (("clip", "norm"), ("clip_value", "value")):
        number = getattr(options, name)
        if number is not None and (not isinstance(number, (int, float)) or isinstance(number, bool)):
            raise TypeError(f"{name}={number!r} must be a number")
        if number is not None and not number > 0:
            raise ValueError(f"{name}={number} must be a positive {what}; leave it out for no clipping")
    if options.clip is not None and options.clip_value is not None:
        raise ValueError("clip= and clip_value= are two ways to clip: give one of them")
    scheduler = options.scheduler
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "scheduler: ReduceLROnPlateau waits for a loss: call its step(loss) yourself, and leave it out here"
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise TypeError(f"scheduler must be a learning-rate scheduler, not {type(scheduler).__name__}")
    driven = getattr(scheduler, "optimizer", None)
    if isinstance(driven, torch.optim.Optimizer) and getattr(driven, "optimizer", driven) not in optimizers:
        raise ValueError(
            f"scheduler: this {type(scheduler).__name__} changes the learning rate of another {type(driven).__name__} "
            "than is attached here: build it on the optimizer that is given with it"
        )


def _check_file(engine: Engine, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
    """Only the one pass keeps its states in a file; others would make theirs in host memory, without a word."""
    faces = {
        id(face) for slab in engine.slabs() if slab.tier is Tier.NVME and slab.requires_grad for face in slab.faces
    }
    known = engine.faces()
    held = [known[id(p)][1] for group in optimizer.param_groups for p in group["params"] if id(p) in known]
    if not any(id(face) in faces for face in held):
        return
    reason = "one_pass=False rules it out" if options.one_pass is False else why_not_one_pass(optimizer, known)
    if reason is not None:
        raise ValueError(
            f"offload: states in a file need the one-pass update, and {reason}; use 'optimizer': 'host', or with "
            "'auto' leave 'path' out"
        )


def _check_one_pass(engine: Engine, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
    needed = options.one_pass or engine.precision.needs_one_pass
    reason = why_not_one_pass(optimizer, engine.faces()) if needed else None
    if needed and options.one_pass is False:
        reason = "one_pass=False rules it out"
    if needed and not any(isinstance(face, ShardedParameter) for _, face in engine.trained_faces()):
        reason = "it works on pieces, and at stage 0 in fp32 there are none; pass fused=True to the optimizer instead"
    if reason is not None:
        why = "one_pass=True" if options.one_pass else "bf16 moments or masters, with their stochastic rounding,"
        raise ValueError(f"{why} needs the one-pass update: {reason}")


def check_groups(optimizer: torch.optim.Optimizer, faces: dict[int, tuple[str, Tensor]]) -> None:
    for position, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in faces and parameter.numel():
            raise ValueError(
                f"{type(optimizer).__name__}: parameter {position} of shape {tuple(parameter.shape)} is not one of "
                "the model's; build the optimizer from this model's parameters"
            )


def check_kind(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Whether the optimizer gives the same update on what a rank has as on the whole model."""
    name = type(optimizer).__name__
    if engine.groups.model is not None:
        _check_kind_over_the_model(engine, optimizer)
    if not engine.row.optimizer.is_cut:
        return
    if engine.row.has_owners:
        reason = why_not_by_parameter(optimizer)
        if reason is not None:
            raise ValueError(
                f"{name} does not work parameter by parameter ({reason}), so owners cannot update each their own: use "
                "stage 0, where every rank has everything"
            )
        return
    reason = why_not_elementwise(optimizer)
    if reason is not None:
        raise ValueError(
            f"{name} does not work element by element ({reason}), so it cannot train on even pieces: it needs the "
            "whole-parameter cut (cut='whole'), or stage 0, where nothing is cut"
        )


def _check_kind_over_the_model(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Whatever ZeRO leaves whole, a rank has a part of the layers, or the layers of its stage."""
    name, faces = type(optimizer).__name__, engine.faces()
    cut = {entry.name for slab in engine.slabs() for entry in slab.entries if entry.part and entry.part.is_cut}
    held = (faces[id(p)][0] for group in optimizer.param_groups for p in group["params"] if id(p) in faces)
    first = next((each for each in held if each in cut), None)
    reason = None if first is None else why_not_elementwise(optimizer)
    if reason is not None:
        raise ValueError(
            f"{name} does not work element by element ({reason}), and the tensor axis leaves a part of '{first}' here: "
            "use an optimizer like AdamW, or a mesh with tensor=1"
        )
    reason = why_not_by_parameter(optimizer)
    if reason is not None:
        raise ValueError(
            f"{name} does not work parameter by parameter ({reason}), and other ranks hold other parameters of the "
            "model: use an optimizer like AdamW, or a mesh with tensor=1 and pipeline=1"
        )
