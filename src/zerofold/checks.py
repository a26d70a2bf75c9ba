"""What can be said against a model, a mesh and numbers before any of it is placed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerofold.parallel.marks import pipeline_ranks, tensor_ranks
from zerofold.parallel.mesh import PIPELINE, TENSOR, Mesh


def check_axes(model: nn.Module, mesh: DeviceMesh | Mesh | None) -> None:
    """ZeRO over ranks that hold other parts of the model would mix these, and their gradients, without a word."""
    if not isinstance(mesh, Mesh) or mesh.tensor == 1:
        spread = next((name for name, p in model.named_parameters() if hasattr(p, "placements")), None)
        if spread is not None:
            raise ValueError(
                f"mesh: '{spread}' is a DTensor, and there is no mesh= with a tensor axis: pass mesh=zf.mesh(tensor=…)"
            )
    cut = {TENSOR: tensor_ranks(model), PIPELINE: pipeline_ranks(model)}
    if mesh is not None and not isinstance(mesh, Mesh):  # somebody has chosen the ranks by hand
        return
    for axis, ranks in cut.items():
        given = 1 if mesh is None else mesh.size(axis)
        if ranks > 1 and given != ranks:
            how = "zf.tensor_parallel" if axis == TENSOR else "zf.pipeline"
            has = "there is no mesh=" if mesh is None else f"that of mesh= has {given}"
            raise ValueError(
                f"mesh: {how} has cut this {type(model).__name__} over {axis}={ranks} ranks, and {has}: pass the "
                "zf.mesh with which it was cut"
            )


def check_stages(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """An optimizer from before `zf.pipeline` has what other ranks hold now."""
    ranks = pipeline_ranks(model)
    if ranks == 1:
        return
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = sum(id(parameter) in known for parameter in held)
        if 0 < own < len(held):
            raise ValueError(
                f"{type(optimizer).__name__}: {len(held) - own} of its {len(held)} parameters are not of this rank's "
                f"stage: zf.pipeline has left each of {ranks} ranks a stage, so build the optimizer after it, on "
                "pipe.parameters()"
            )


def check_ready(model: nn.Module) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "there is no process group yet: start the script with torchrun (or zerofold launch) and call "
            "torch.distributed.init_process_group() before zerofold"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")


def check_wrappers(model: nn.Module) -> None:
    """Others that reduce gradients or cut parameters by themselves would do it beside zerofold."""
    for name, module in model.named_modules():
        # By name, since most programs have no need of torch's FSDP, which takes a second to import.
        is_cut = any(base.__module__.startswith("torch.distributed.fsdp.") for base in type(module).__mro__)
        if is_cut or isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            fix = "leave fully_shard or the wrapper out" if is_cut else "give what it wraps (its .module)"
            raise ValueError(
                f"{repr(name) if name else 'the model'} is a {type(module).__name__} of torch, which shares gradients "
                f"among ranks by itself, as zerofold does: {fix}"
            )


def check_kinds(mesh: DeviceMesh | None, **functions: object) -> None:
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name}={function!r} must be a function, or None")
    if mesh is None:
        return
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a zf.mesh(...) or a torch DeviceMesh, not {type(mesh).__name__}")
    if not 1 <= mesh.ndim <= 2:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions; pass the one or two to shard over, for example mesh['data']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh; only its ranks may call zerofold with it")
    if mesh.ndim == 2 and not all(bool((mesh.mesh.diff(dim=dim) > 0).all()) for dim in (0, 1)):
        ranks = mesh.mesh.tolist()
        raise ValueError(f"mesh: ranks must ascend along both dimensions, as init_device_mesh makes them, not {ranks}")


def check_numbers(
    live_bytes: int | None,
    buffer_bytes: int | None,
    accumulate: int,
    patience: float | None,
    check_replicas: int | None,
) -> None:
    numbers = {"live_bytes": live_bytes, "buffer_bytes": buffer_bytes, "accumulate": accumulate}
    numbers["check_replicas"] = check_replicas
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise TypeError(f"{name}={number!r} must be a whole number")
    if live_bytes is not None and live_bytes <= 0:
        raise ValueError(f"live_bytes={live_bytes} must be a positive number of bytes, or None for the default")
    if buffer_bytes is not None and buffer_bytes < 1024:
        raise ValueError(f"buffer_bytes={buffer_bytes} is too small for a communication buffer; give at least 1024")
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate} must be the number of backwards in a step, at least 1")
    if check_replicas is not None and check_replicas < 1:
        raise ValueError(f"check_replicas={check_replicas} must be a number of steps, or None for never")
    if patience is not None and (not isinstance(patience, (int, float)) or not patience >= 5):
        raise ValueError(
            f"patience={patience!r} must be a number of seconds, at least 5; leave it out for the group's own time-out"
        )


def device_of(model: nn.Module, mesh: DeviceMesh | None, wanted: torch.device | str | None) -> torch.device:
    try:
        kind_wanted = None if wanted is None else torch.device(wanted).type
    except (RuntimeError, TypeError):
        raise ValueError(f"device={wanted!r} is no device: give 'cuda', 'cpu' or a torch.device") from None
    devices = {p.device for p in model.parameters() if p.numel()}
    if not devices:
        raise ValueError(f"this {type(model).__name__} has no parameters, so there is nothing to shard")
    real = {device for device in devices if device.type != "meta"}
    if len(real) > 1:
        names = ", ".join(sorted(str(device) for device in real))
        raise ValueError(f"the model's parameters are on {names}; move it to one device first")
    if real:
        (device,) = real
        if kind_wanted is not None and kind_wanted != device.type:
            raise ValueError(
                f"device={str(wanted)!r}, but the model is on {device}: move it there first, or leave device out"
            )
        return device
    kind = mesh.device_type if mesh is not None else torch.accelerator.current_accelerator(check_available=True)
    return torch.empty(0, device=wanted or kind or "cpu").device  # with its index, as parameters will have it
