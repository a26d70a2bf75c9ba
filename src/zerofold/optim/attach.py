"""Puts an existing optimizer onto this rank's pieces: the same object, with its groups, schedule and state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zerofold.comm import Comm
from zerofold.engine import Engine
from zerofold.optim.adam import why_not_one_pass
from zerofold.optim.probe import scalar_states, why_not_by_parameter, why_not_elementwise
from zerofold.optim.step import Step, StepOptions
from zerofold.placement import Tier
from zerofold.sharded import ShardedParameter, ShardedTensor

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
        _check_groups(optimizer, optimizer.param_groups, faces)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        covered |= {id(faces[id(p)][1]) for p in held if id(p) in faces}
        _check_kind(engine, optimizer)
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
    reason = "one_pass=False rules it out" if options.one_pass is False else why_not_one_pass(optimizer)
    if reason is not None:
        raise ValueError(
            f"offload: states in a file need the one-pass update, and {reason}; use 'optimizer': 'host', or with "
            "'auto' leave 'path' out"
        )


def _check_one_pass(engine: Engine, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
    needed = options.one_pass or engine.precision.needs_one_pass
    reason = why_not_one_pass(optimizer) if needed else None
    if needed and options.one_pass is False:
        reason = "one_pass=False rules it out"
    if needed and not any(isinstance(face, ShardedParameter) for _, face in engine.trained_faces()):
        reason = "it works on pieces, and at stage 0 in fp32 there are none; pass fused=True to the optimizer instead"
    if reason is not None:
        why = "one_pass=True" if options.one_pass else "bf16 moments or masters, with their stochastic rounding,"
        raise ValueError(f"{why} needs the one-pass update: {reason}")


def _check_groups(optimizer: torch.optim.Optimizer, groups: list[Any], faces: dict[int, tuple[str, Tensor]]) -> None:
    for position, parameter in enumerate(p for group in groups for p in group["params"]):
        if id(parameter) not in faces and parameter.numel():
            raise ValueError(
                f"{type(optimizer).__name__}: parameter {position} of shape {tuple(parameter.shape)} is not one of "
                "the model's; build the optimizer from this model's parameters"
            )


def _check_kind(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
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


def attach_optimizer(engine: Engine, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
    put_onto_pieces(engine, optimizer)
    engine.optimizers.append(optimizer)
    if options.scheduler is not None:
        engine.schedulers.append(options.scheduler)
    step = Step(engine, optimizer, options)
    _ask_grad_scalers(engine, optimizer)
    known = len(optimizer.param_groups), engine.changes.count

    def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        nonlocal known
        engine.end_step()  # of another optimizer, or one that raised
        now = len(optimizer.param_groups), engine.changes.count
        if now != known:  # a group was added, or parameters were cut anew
            _check_groups(optimizer, optimizer.param_groups, engine.faces())
            _check_kind(engine, optimizer)
            put_onto_pieces(engine, optimizer)
            known = now
        itself, *positional = args
        closure = kwargs.get("closure", positional[0] if positional else None)
        if closure is None:
            step.begin()
            return None
        # The closure runs backward inside the step, so what belongs between the two must run at its end.
        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        return (itself, _between(engine.end_step, closure, step.begin), *positional[1:]), rest

    def after_step(*_: Any) -> None:
        step.end()

    hooks = [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(after_step),
        # A state dict from elsewhere has whole tensors; each rank keeps its range of them.
        optimizer.register_load_state_dict_post_hook(recut),
    ]
    engine.on_close.append(partial(_end, optimizer, hooks))


def _end(optimizer: torch.optim.Optimizer, hooks: list[RemovableHandle]) -> None:
    for hook in hooks:  # which know the engine
        hook.remove()
    if _pieces(optimizer):  # else it may train the model again, closed or sharded anew
        optimizer.register_step_pre_hook(_refuse_closed)


def _pieces(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]


def _refuse_closed(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # Somebody may have given it other parameters since, and a model that has sharded them.
    if any(Engine.of_parameter(piece) is None for piece in _pieces(optimizer)):
        raise RuntimeError(
            "the model of this optimizer was closed, so a step would change nothing: build a new optimizer on the "
            "model's parameters"
        )


def _ask_grad_scalers(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """To hand their verdict over and leave the step to the optimizer, where each rank sees a part of the gradients.

    By itself a torch.amp.GradScaler skips `optimizer.step()` where it found an overflow, and the other ranks would wait
    for that one. `Step` refuses it, on all of them.
    """
    is_set = getattr(optimizer, "_step_supports_amp_scaling", False)  # as torch's fused optimizers have it
    are_sharded = all(isinstance(p, ShardedParameter) for group in optimizer.param_groups for p in group["params"])
    if engine.groups.model is None or are_sharded or is_set:
        return
    vars(optimizer)["_step_supports_amp_scaling"] = True
    engine.on_close.append(lambda: vars(optimizer).pop("_step_supports_amp_scaling", None))


def put_onto_pieces(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Puts the faces into the groups, with whatever state the optimizer has for the parameters they stand for."""
    faces = engine.faces()
    scalars = scalar_states(optimizer)
    for group in optimizer.param_groups:
        before = list(group["params"])
        group["params"][:] = [faces[id(p)][1] if id(p) in faces else p for p in before]  # LBFGS keeps the list
        for old, new in zip(before, group["params"], strict=True):
            if old in optimizer.state:
                optimizer.state[new] = _cut_state(optimizer.state.pop(old), new, scalars)
        _keep_many_tensor_kernels(group)


def recut(optimizer: torch.optim.Optimizer) -> None:
    """Of states that are whole, as a state dict from elsewhere has them, this rank's pieces."""
    scalars = scalar_states(optimizer)
    for parameter, state in optimizer.state.items():
        state.update(_cut_state(state, parameter, scalars))


def _between(
    before: Callable[[], None], closure: Callable[[], Any], afterwards: Callable[[], None]
) -> Callable[[], Any]:
    def run() -> Any:
        before()  # a second call must find all gradients, to clear them
        loss = closure()
        afterwards()
        return loss

    return run


def _cut_state(state: dict[str, Any], face: Tensor, scalars: frozenset[str]) -> dict[str, Any]:
    if not isinstance(face, ShardedParameter):
        return state

    def cut(key: str, value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            if value.spec is face.spec:
                return value
            value = value.full_tensor()  # the parameter was cut anew; all ranks come here
        if not isinstance(value, Tensor) or value.shape != face.shape or key in scalars:
            return value
        return ShardedTensor(face.spec.cut(value.to(face.dtype)).clone(), face.spec)

    return {key: cut(key, value) for key, value in state.items()}


def _keep_many_tensor_kernels(group: dict[str, Any]) -> None:
    """On an accelerator torch picks foreach kernels by itself, but only for its own tensor types: ask for them."""
    unset = group.get("foreach", False) is None and not group.get("fused")
    if unset and any(isinstance(p, ShardedParameter) and p.device.type != "cpu" for p in group["params"]):
        group["foreach"] = True
