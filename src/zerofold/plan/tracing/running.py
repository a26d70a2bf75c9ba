"""One forward and backward of a model without memory, with a log of what it would take.

Where a unit begins and ends is noticed as the engine notices it (`zerofold.hooks`): by the module's own hooks in
forward, and in backward by the nodes that made its outputs and its inputs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.hooks import RemovableHandle

from zerofold.boundary import Boundary
from zerofold.entry import dtypes_of
from zerofold.loss_scale import LossScaler
from zerofold.nested import map_tensors, tensors_in
from zerofold.plan.shape import Phase
from zerofold.plan.tracing.answers import Answers
from zerofold.plan.tracing.kernels import DeviceKernels
from zerofold.plan.tracing.recording import BecameGradient, Entered, Recorder, Recording, SlabComplete
from zerofold.plan.tracing.shadow import Shadow
from zerofold.precision import Precision
from zerofold.schedule import in_backward

Loss = Callable[[Any], Tensor]
"""Makes the number that backward starts from out of what the model returns."""


def record(
    shadow: Shadow,
    example: Any,
    samples: int,
    *,
    policy: Precision,
    device: str,
    keepers: Sequence[nn.Module],
    loss: Loss | None,
    buffer_bytes: int,
    answers: Answers | None = None,
) -> Recording:
    """Runs `samples` samples like the example's through forward and backward. `answers`: what earlier runs of the same
    trace have found out, which this one adds to."""
    recording = Recording(samples)
    args, kwargs = _batch(example, samples)
    boundary = Boundary(policy, LossScaler(policy.scaling))
    boundary.look(shadow.model)
    recorder = Recorder(recording, device, shadow.states, answers)
    recording.events.append(Entered(Phase.FORWARD, 0))
    recorder.adopt(tensors_in((args, kwargs)))
    inputs: set[int] = set()

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not in_backward():
            inputs.update(number for tensor in tensors_in((args, kwargs)) if (number := recorder.number_of(tensor)))

    handles = [keeper.register_forward_pre_hook(keep, with_kwargs=True) for keeper in keepers]
    try:
        with (
            _watching(shadow, recorder, recording, buffer_bytes),
            DeviceKernels(device),
            recorder,
            _readable(shadow.model),
        ):
            args, kwargs = boundary.enter(args, kwargs)
            output = boundary.leave(shadow.model(*args, **kwargs), (), is_recomputed=False)
            start = start_of_backward(output, loss, recording)
            # What a training loop keeps of the batch and the output it keeps until the step is over.
            recording.kept_inputs = sum(recorder.sizes.get(number, 0) for number in inputs)
            recording.events.append(Entered(Phase.BACKWARD, 0))
            start.backward()
    finally:
        boundary.remove()
        for handle in handles:
            handle.remove()
    return recording


def _batch(example: Any, samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example with another number of samples, on the meta device: tensors whose first dimension is the batch's."""
    first = next((tensor for tensor in tensors_in(example) if tensor.dim()), None)
    if first is None:
        raise ValueError("example: there is no tensor in it; give the arguments of one call of the model")

    def resized(tensor: Tensor) -> Tensor:
        is_batched = tensor.dim() > 0 and tensor.shape[0] == first.shape[0]
        shape = (samples, *tensor.shape[1:]) if is_batched else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    made = map_tensors(resized, example)
    if isinstance(made, Mapping):
        return (), dict(made)
    return (tuple(made), {}) if isinstance(made, (tuple, list)) else ((made,), {})


def start_of_backward(output: Any, loss: Loss | None, recording: Recording) -> Tensor:
    if loss is not None:
        return loss(output)
    found = output["loss"] if isinstance(output, Mapping) and "loss" in output else getattr(output, "loss", None)
    if found is None:
        found = next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
    if not isinstance(found, Tensor) or not found.requires_grad:
        raise ValueError(
            "the model returned nothing that depends on a trained parameter, so there is no backward to trace: give "
            "labels in the example, or loss=…"
        )
    if found.numel() > 1:
        recording.notes.append(f"the model returns no loss; the sum of its output {tuple(found.shape)} stands for it")
        return found.float().sum()
    return found


@contextmanager
def _watching(shadow: Shadow, recorder: Recorder, recording: Recording, buffer_bytes: int) -> Iterator[None]:
    """Logs which unit computes, and which storages are gradients of parameters."""
    running: list[int] = []
    handles: list[RemovableHandle] = []
    log = recording.events.append
    going_back: list[int] = [0]  # whose backward it is

    def entered(phase: Phase, unit: int) -> None:
        if phase is Phase.BACKWARD:
            going_back[0] = unit
        log(Entered(phase, unit))

    def begins(unit: int, gradients: Any) -> None:
        entered(Phase.BACKWARD, unit)

    def ends(unit: int, gradients: Any) -> None:
        if going_back[0] == unit:  # otherwise the one before has begun: the same node made what one takes of the other
            entered(Phase.BACKWARD, _around(shadow, unit))

    def before(unit: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(unit)
        recording.recomputes |= in_backward()
        entered(Phase.BACKWARD if in_backward() else Phase.FORWARD, unit)
        if torch.is_grad_enabled() and not in_backward():
            for node in {tensor.grad_fn for tensor in tensors_in((args, kwargs)) if tensor.grad_fn is not None}:
                node.register_prehook(partial(ends, unit))

    def after(unit: int, module: nn.Module, args: Any, output: Any) -> None:
        if running:
            running.pop()
        outer = running[-1] if running else unit if in_backward() else 0
        entered(Phase.BACKWARD if in_backward() else Phase.FORWARD, outer)
        if torch.is_grad_enabled() and not in_backward():
            for node in {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}:
                node.register_prehook(partial(begins, unit))

    for number, module in enumerate(shadow.units.values(), start=1):
        handles.append(module.register_forward_pre_hook(partial(before, number), with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(partial(after, number), always_call=True))

    def arrived(slab: int, chunks: int, waiting: set[Tensor], parameter: Tensor) -> None:
        # As the engine does: taken at once, so that the next gradient finds nothing to be added to.
        gradient, parameter.grad = parameter.grad, None
        number = None if gradient is None else recorder.number_of(gradient)
        if number is not None:
            log(BecameGradient(number, slab))
        waiting.discard(parameter)
        if not waiting:
            log(SlabComplete(slab, chunks))

    for number, slab in enumerate(shadow.slabs):
        waiting: set[Tensor] = {entry.parameter for entry in slab if entry.parameter.requires_grad}
        sent = sum(parameter.numel() for parameter in waiting) * dtypes_of(slab[0]).reduction.itemsize
        hook = partial(arrived, number, -(-sent // buffer_bytes), waiting)
        handles += [parameter.register_post_accumulate_grad_hook(hook) for parameter in [*waiting]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _around(shadow: Shadow, unit: int) -> int:
    """The unit whose turn it is when this one's backward is through: the one around it, or the root."""
    names = list(shadow.units)
    own = names[unit - 1]
    outer = [number for number, name in enumerate(names, start=1) if own.startswith(f"{name}.")]
    return outer[-1] if outer else 0


@contextmanager
def _readable(model: nn.Module) -> Iterator[None]:
    """An error about a tensor without values names the line that wanted one."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, CheckpointError) or "meta" not in str(error).lower():
            raise
        here = Path(__file__).parent
        outside = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if here not in Path(frame.filename).parents and "/torch/" not in frame.filename
        ]
        where = f"{outside[-1].filename}:{outside[-1].lineno} `{outside[-1].line}`" if outside else type(model).__name__
        raise ValueError(
            f"{where} reads the value of a tensor, and a trace has shapes alone: leave out of the example what it is "
            f"read from, or build the model so that it does not ask ({str(error).splitlines()[0].split('. ')[0]})"
        ) from error
