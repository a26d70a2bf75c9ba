"""torch's fused Adam on a strip of many blocks, in one call that leaves the interpreter's lock to others.

    a thread of Python    [call                                             ]      20 µs with the lock, 10 ms without
    inside                [cast b0][fused b0][cast b0][cast b1][fused b1] …        as `adam_cpu` does it

With a call for each operation every thread asks for the lock again and again, and so does whoever launches a GPU's
kernels. Beside eight such threads that one got a tenth of the small operations done that it did beside one.

The loop is TorchScript, since that is the one interpreter in torch that runs without the lock and needs no compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Lists inside lists, and made by the caller: TorchScript takes a write to a list of its own for one that nobody sees,
# and leaves the whole update out. `_is_right` looks.
_LOOP = """
def update(masters: List[List[Tensor]], gradients: List[List[Tensor]], averages: List[List[Tensor]],
           squares: List[List[Tensor]], rooms: List[List[Tensor]], made: List[Tensor], step: List[Tensor],
           divisor: Optional[Tensor], decoupled: bool, lr: float, beta1: float, beta2: float, weight_decay: float,
           eps: float, maximize: bool):
    none = torch.jit.annotate(List[Tensor], [])
    for index in range(len(masters)):
        gradient = gradients[index]
        if len(rooms) > 0:
            rooms[index][0].copy_(gradient[0])
            gradient = rooms[index]
        if decoupled:
            torch._fused_adamw_(masters[index], gradient, averages[index], squares[index], none, step, lr=lr,
                                beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False,
                                maximize=maximize, grad_scale=divisor)
        else:
            torch._fused_adam_(masters[index], gradient, averages[index], squares[index], none, step, lr=lr,
                               beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False,
                               maximize=maximize, grad_scale=divisor)
        if len(made) > 0:
            made[index].copy_(masters[index][0])
"""

Blocks = list[list[Tensor]]


class Strip(NamedTuple):
    """A range of one parameter, all flat and of one size."""

    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    made: Tensor | None
    """Where the new parameter is written, in its own dtype; it may take the gradient's place."""


class Numbers(NamedTuple):
    """Of a step of one parameter, in the order of the loop."""

    step: list[Tensor]
    divisor: Tensor | None
    """Of the gradient, which is written back divided."""
    decoupled: bool
    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    maximize: bool


def update_strip(strip: Strip, numbers: Numbers, room: Tensor) -> None:
    """`room`: fp32 memory for the gradient of a block, whose size it gives; of one thread alone.

    >>> ones = [torch.ones(5) for _ in range(4)]
    >>> numbers = Numbers([torch.tensor(1.0)], None, True, 0.1, 0.9, 0.99, 0.0, 1e-8, False)
    >>> update_strip(Strip(*ones, made=None), numbers, torch.empty(2))
    >>> ones[0].tolist() == [ones[0][0].item()] * 5, round(ones[0][0].item(), 2)
    (True, 0.9)
    """
    loop = _loop() or _update_blocks
    with torch.no_grad():
        loop(*_blocks(strip, numbers, room), *numbers)


def _blocks(
    strip: Strip, numbers: Numbers, room: Tensor
) -> tuple[Blocks, Blocks, Blocks, Blocks, Blocks, list[Tensor]]:
    size = room.numel()
    masters, gradients, averages, squares = ([[block] for block in tensor.split(size)] for tensor in strip[:4])
    rooms: list[list[Tensor]] = []
    if strip.gradient.dtype is not torch.float32 or numbers.divisor is not None:
        rooms = [[room]] * len(masters)
        rooms[-1] = [room[: masters[-1][0].numel()]]
    return masters, gradients, averages, squares, rooms, [] if strip.made is None else list(strip.made.split(size))


@cache
def _loop() -> Callable[..., None] | None:
    """None where it does not do what it says; the same loop in Python is right then, and slower."""
    try:
        made: Callable[..., None] = torch.jit.CompilationUnit(_LOOP).update
        is_right = all(_is_right(made) for _ in range(3))  # TorchScript looks at two calls before it settles
    except (RuntimeError, AttributeError):
        is_right = False
    if is_right:
        return made
    warnings.warn(
        f"TorchScript of torch {torch.__version__} does not run the update of offloaded states; Python does, and a GPU "
        "may wait for its kernels meanwhile",
        stacklevel=2,
    )
    return None


def _is_right(loop: Callable[..., None]) -> bool:
    """Beside the same loop in Python, on blocks that do not divide the strip."""
    numbers = Numbers([torch.tensor(3.0)], torch.tensor(2.0), True, 0.1, 0.9, 0.99, 0.1, 1e-8, False)
    values = torch.arange(1.0, 81.0)
    results = []
    for run in (loop, _update_blocks):
        strip = Strip(values.clone(), values.bfloat16(), values / 7, values / 3, torch.empty(80, dtype=torch.bfloat16))
        with torch.no_grad():
            run(*_blocks(strip, numbers, torch.empty(32)), *numbers)
        results.append(strip)
    is_same = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return is_same and not torch.equal(results[0].master, values)


def _update_blocks(
    masters: Blocks,
    gradients: Blocks,
    averages: Blocks,
    squares: Blocks,
    rooms: Blocks,
    made: list[Tensor],
    *numbers: Any,
) -> None:
    """The loop above, for who reads it, and for a torch that cannot run it."""
    its = Numbers(*numbers)
    kernel: Any = torch._fused_adamw_ if its.decoupled else torch._fused_adam_
    for index, master in enumerate(masters):
        gradient = gradients[index]
        if rooms:
            rooms[index][0].copy_(gradient[0])
            gradient = rooms[index]
        kernel(
            master,
            gradient,
            averages[index],
            squares[index],
            [],
            its.step,
            lr=its.lr,
            beta1=its.beta1,
            beta2=its.beta2,
            weight_decay=its.weight_decay,
            eps=its.eps,
            amsgrad=False,
            maximize=its.maximize,
            grad_scale=its.divisor,
        )
        if made:
            made[index].copy_(master[0])
