"""Adam and AdamW in one pass over memory: every number is read once and written once.

    read    gradient   master   exp_avg   exp_avg_sq
               │ × scale, clamp, to fp32    │
               └────────► Adam ◄────────────┘
    write    copy      master   exp_avg   exp_avg_sq

Apart, the cast of the gradient, clipping, the update and the cast of the new parameter move 48 bytes per parameter
with 16-bit parameters and fp32 states; together they move 28.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

STATE_DTYPES = (torch.float32, torch.bfloat16)
GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COPY_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AdamSettings:
    """The numbers of one parameter group at one step.

    >>> AdamSettings(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0).step_size(1)
    1.0000000000000002
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool = True
    """AdamW: the decay shrinks the parameter. Otherwise it joins the gradient, as in Adam."""
    maximize: bool = False

    @property
    def of_kernel(self) -> dict[str, Any]:
        """As torch's fused kernels take them; whether decay is decoupled chooses the kernel."""
        return {
            "lr": self.lr,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "weight_decay": self.weight_decay,
            "eps": self.eps,
            "amsgrad": False,
            "maximize": self.maximize,
        }

    def step_size(self, step: int) -> float:
        """The learning rate over the first moment's bias correction."""
        return self.lr / (1 - self.beta1**step)

    def root_of_correction(self, step: int) -> float:
        """The square root of the second moment's bias correction."""
        return math.sqrt(1 - self.beta2**step)


class AdamTensors(NamedTuple):
    """What the update of one parameter, or of one piece, reads and writes.

    All are contiguous, on one device, and have the same number of elements.
    """

    master: Tensor
    """fp32, or bf16: then it is written with stochastic rounding."""
    gradient: Tensor
    """fp32, bf16 or fp16. Never changed."""
    exp_avg: Tensor
    """fp32, or bf16: then it is written with stochastic rounding. So is `exp_avg_sq`."""
    exp_avg_sq: Tensor
    copy: Tensor | None
    """A 16-bit parameter that gets the new master, rounded to nearest."""
    step: int
    """The number of this update for this tensor: 1 for the first."""
    seed: int
    """For stochastic rounding, below 2**63. The same seed on the same kind of device gives the same bits."""


Launch = Callable[[Tensor | None], None]
"""Does the update; takes the scale."""


def adam(
    tensors: Sequence[AdamTensors],
    settings: AdamSettings,
    *,
    scale: Tensor | None = None,
    clip_value: float | None = None,
) -> None:
    """Updates every master, its moments and its copy by the gradient `clamp(gradient × scale, ±clip_value)`.

    `scale` is an fp32 tensor of one element on the tensors' device, so that a clip coefficient need not visit the host.
    The arithmetic is fp32 whatever the dtypes are.

    >>> master, copy = torch.ones(4), torch.empty(4, dtype=torch.bfloat16)
    >>> states = AdamTensors(master, torch.ones(4), torch.zeros(4), torch.zeros(4), copy, step=1, seed=0)
    >>> adam([states], AdamSettings(lr=0.5, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0))
    >>> copy
    tensor([0.5000, 0.5000, 0.5000, 0.5000], dtype=torch.bfloat16)
    """
    prepare(tensors, settings, clip_value=clip_value)(scale)


def prepare(tensors: Sequence[AdamTensors], settings: AdamSettings, *, clip_value: float | None = None) -> Launch:
    """All of `adam` that needs neither the scale nor the gradients' values, which may still be under way.

    >>> master = torch.ones(4)
    >>> states = AdamTensors(master, torch.ones(4), torch.zeros(4), torch.zeros(4), None, step=1, seed=0)
    >>> launch = prepare([states], AdamSettings(lr=0.5, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0))
    >>> launch(None)
    >>> master
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    present = [each for each in tensors if each.master.numel()]
    if clip_value is not None and not clip_value > 0:
        raise ValueError(f"clip_value={clip_value} must be positive; leave it out for no clipping")
    if not present:
        return lambda scale: None
    device = present[0].master.device
    for index, each in enumerate(present):
        _check(index, each, device)
    update = _prepare_on(device, present, settings, clip_value)

    def launch(scale: Tensor | None) -> None:
        if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != device):
            raise ValueError(
                f"scale is {tuple(scale.shape)} of {scale.dtype} on {scale.device}; it must be one fp32 number on "
                f"{device}"
            )
        with torch.no_grad():
            update(scale)

    return launch


def _prepare_on(
    device: torch.device, tensors: Sequence[AdamTensors], settings: AdamSettings, clip_value: float | None
) -> Launch:
    """Imported when used: Triton is large, and may not be installed."""
    if device.type == "cuda":
        from zerofold.optim import adam_triton

        if adam_triton.HAS_TRITON:
            return adam_triton.prepare(tensors, settings, clip_value)
    if device.type == "cpu":
        from zerofold.optim import adam_cpu

        return partial(adam_cpu.update, tensors, settings, clip_value=clip_value)
    if device.type == "meta":
        from zerofold.optim import adam_shapes

        return partial(adam_shapes.update, tensors, settings, clip_value=clip_value)
    from zerofold.optim import adam_plain

    return partial(adam_plain.update, tensors, settings, clip_value=clip_value)


def _check(index: int, each: AdamTensors, device: torch.device) -> None:
    numel = each.master.numel()
    for name, tensor, dtypes in (
        ("master", each.master, STATE_DTYPES),
        ("gradient", each.gradient, GRADIENT_DTYPES),
        ("exp_avg", each.exp_avg, STATE_DTYPES),
        ("exp_avg_sq", each.exp_avg_sq, STATE_DTYPES),
        ("copy", each.copy, COPY_DTYPES),
    ):
        if tensor is None and name == "copy":
            continue
        assert tensor is not None
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} {index} is {tensor.dtype}; it must be one of {', '.join(map(str, dtypes))}")
        if tensor.numel() != numel:
            raise ValueError(f"{name} {index} has {tensor.numel()} elements, its master {numel}")
        if tensor.device != device:
            raise ValueError(f"{name} {index} is on {tensor.device}, the first master on {device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} {index} of shape {tuple(tensor.shape)} is not contiguous")
    if each.step < 1:
        raise ValueError(f"step {each.step} of tensors {index}: the first update is step 1")
    if not 0 <= each.seed < 2**63:
        raise ValueError(f"seed {each.seed} of tensors {index} must be in range(2**63)")
