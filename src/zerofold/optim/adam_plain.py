"""The update in plain torch operations: for devices without a kernel of their own, and to compare kernels with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerofold.optim.onepass import AdamSettings, AdamTensors


def update(
    tensors: Sequence[AdamTensors], settings: AdamSettings, scale: Tensor | None, clip_value: float | None
) -> None:
    for each in tensors:
        gradient = each.gradient.float()
        if scale is not None:
            gradient = gradient * scale
        if clip_value is not None:
            gradient = gradient.clamp(-clip_value, clip_value)
        if settings.maximize:
            gradient = -gradient
        master, exp_avg, exp_avg_sq = each.master.float(), each.exp_avg.float(), each.exp_avg_sq.float()
        if settings.decoupled:
            master = master * (1 - settings.lr * settings.weight_decay)
        else:
            gradient = gradient + settings.weight_decay * master
        exp_avg = exp_avg.lerp(gradient, 1 - settings.beta1)
        exp_avg_sq = settings.beta2 * exp_avg_sq + (1 - settings.beta2) * gradient * gradient
        denominator = exp_avg_sq.sqrt() / settings.root_of_correction(each.step) + settings.eps
        master = master - settings.step_size(each.step) * exp_avg / denominator

        generator = torch.Generator(master.device).manual_seed(each.seed)
        for held, new in ((each.master, master), (each.exp_avg, exp_avg), (each.exp_avg_sq, exp_avg_sq)):
            held.copy_(new if held.dtype == torch.float32 else stochastic(new, generator))
        if each.copy is not None:
            each.copy.copy_(each.master)


def stochastic(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 values to bf16, up or down with the probability that makes the mean exact.

    A bf16 number is the upper half of an fp32 number. A uniform number is added to the lower half, then that half is
    cut off: the carry comes with the probability that the lower half stands for.

    >>> stochastic(torch.tensor([1.0, -2.5]), torch.Generator())  # bf16 has these, so nothing is rounded
    tensor([ 1.0000, -2.5000], dtype=torch.bfloat16)
    """
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = (values.view(torch.int32) + noise).bitwise_and(-(2**16)).view(torch.float32)
    # A carry out of the largest NaN would turn it into zero.
    return torch.where(values.isnan(), values, rounded).bfloat16()
