"""fp16, bf16 and data_types as one zerofold.precision.Precision."""

from __future__ import annotations

import torch
from torch import nn

from zerofold.config.checking import Checked
from zerofold.config.errors import wrong
from zerofold.config.settings import Component
from zerofold.loss_scale import LossScale
from zerofold.placement import row
from zerofold.precision import Precision

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_BFLOAT16 = ("bf16", "bfloat16", "torch.bfloat16")
_AUTOCAST = "torch_autocast.dtype"
_FP16, _BF16 = "fp16.enabled", "bf16.enabled"
_MASTER, _MOMENTS = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
_SENT, _SUMMED = "communication_data_type", "data_types.grad_accum_dtype"


def resolve_precision(
    checked: Checked, *, device: torch.device, model: nn.Module | None, optimizer: Component | None
) -> Precision | None:
    """None where the config says nothing about dtypes: then every parameter stays as it is."""
    _settle_autos(checked, device, model)
    if checked[_FP16] and checked[_BF16]:
        raise wrong(_FP16, True, "switch one of fp16.enabled and bf16.enabled off", why="contradicts bf16.enabled")
    compute = torch.float16 if checked[_FP16] else torch.bfloat16 if checked[_BF16] else None
    _check_parameters(checked, compute)
    _check_states(checked, optimizer)
    reduction = _DTYPES.get(checked[_SENT])
    if reduction is torch.float16 and compute is not torch.float16:
        raise wrong(
            _SENT, checked[_SENT], "use bf16 or fp32, or switch fp16.enabled on", why="needs fp16 and its scale"
        )
    accumulation = _DTYPES.get(checked[_SUMMED])
    if accumulation is torch.float16:
        checked.map(_SUMMED, "gradients add up in fp32, since fp16 sums overflow")
        accumulation = torch.float32
    has_bf16_states = compute is torch.bfloat16 and checked[_MASTER]
    buffers = _DTYPES.get(checked["data_types.buffer_dtype"])
    if compute is reduction is accumulation is buffers is None:
        return None
    return Precision(
        parameters=compute,
        reduction=reduction,
        accumulation=accumulation or (torch.bfloat16 if has_bf16_states else None),
        buffers=buffers,
        master=torch.bfloat16 if has_bf16_states else torch.float32,
        moments=torch.bfloat16 if has_bf16_states and checked[_MOMENTS] else torch.float32,
        loss_scale=_loss_scale(checked) if compute is torch.float16 else None,
    )


def resolve_autocast(checked: Checked) -> torch.dtype | None:
    if not checked["torch_autocast.enabled"]:
        return None
    if checked[_AUTOCAST] not in _BFLOAT16:
        fix = 'make it "bfloat16", or switch torch_autocast off and fp16.enabled on'
        raise wrong(_AUTOCAST, checked[_AUTOCAST], fix, why="needs a loss scale, which autocast has not")
    return torch.bfloat16


def _settle_autos(checked: Checked, device: torch.device, model: nn.Module | None) -> None:
    """The model's own 16-bit dtype decides; else the device does, if the other section has not."""
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None) if model is not None else None
    for path, other, dtype in ((_BF16, _FP16, torch.bfloat16), (_FP16, _BF16, torch.float16)):
        if not checked.is_auto(path):
            continue
        if checked[other] is True:
            checked.settle(path, False, f"{other} is true")
        elif own in (torch.bfloat16, torch.float16):
            checked.settle(path, own is dtype, f"the model's dtype is {own}".replace("torch.", ""))
        elif device.type == "cpu":
            checked.settle(path, False, "the model trains in its own dtype on the CPU")
        else:
            is_possible = dtype is torch.float16 or _computes_bf16(device)
            checked.settle(path, is_possible, f"on {device.type}")


def _computes_bf16(device: torch.device) -> bool:
    return torch.cuda.is_bf16_supported() if device.type == "cuda" else True


def _check_parameters(checked: Checked, compute: torch.dtype | None) -> None:
    path = "data_types.param_dtype"
    wanted = _DTYPES.get(checked[path])
    if wanted is not None and wanted is not (compute or torch.float32):
        fix = "leave it out, or switch off fp16.enabled and bf16.enabled"
        if wanted is not torch.float32:
            fix = f"leave it out, or switch {checked[path]}.enabled on"
        raise wrong(path, checked[path], fix, why="contradicts fp16.enabled and bf16.enabled")


def _check_states(checked: Checked, optimizer: Component | None) -> None:
    if checked[_MOMENTS] and not checked[_MASTER]:
        raise wrong(_MOMENTS, True, f"switch {_MASTER} on as well", why="needs bf16 master weights")
    if not checked[_MASTER]:
        return
    if not checked[_BF16]:
        raise wrong(_MASTER, True, "switch bf16.enabled on", why="needs bf16")
    if not row(checked["zero_optimization.stage"]).optimizer.is_cut:
        raise wrong(_MASTER, True, "set zero_optimization.stage to 1, 2 or 3", why="needs a ZeRO stage")
    if optimizer is not None and optimizer.type.lower() not in ("adam", "adamw"):
        raise wrong(_MASTER, True, "use AdamW or Adam", why=f"cannot be kept by {optimizer.type}")


def _loss_scale(checked: Checked) -> LossScale:
    section = checked.section("fp16")
    if section["loss_scale"]:
        return LossScale(static=section["loss_scale"])
    if section["min_loss_scale"] > 2.0 ** section["initial_scale_power"]:
        raise wrong(
            "fp16.min_loss_scale",
            section["min_loss_scale"],
            "lower it, or raise fp16.initial_scale_power",
            why=f"is above the first scale, 2**{section['initial_scale_power']}",
        )
    return LossScale(
        initial_power=section["initial_scale_power"],
        window=section["loss_scale_window"],
        hysteresis=section["hysteresis"],
        consecutive_hysteresis=section["consecutive_hysteresis"],
        minimum=section["min_loss_scale"],
    )
