"""What FSDP's options mean here: each is taken over, or refused with what to do instead.

The option classes themselves are torch's own, so a script may build them from either module.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy

from zerofold.loss_scale import LossScale
from zerofold.placement import row
from zerofold.precision import Keep, Precision

HELD = 2**62
"""live_bytes for parameters that stay gathered from forward to backward: more bytes than any model has."""


@dataclass(frozen=True)
class Sharding:
    """A strategy as arguments of zf.shard."""

    stage: int | str
    is_held: bool
    """Parameters stay gathered from a unit's forward to its backward."""

    @property
    def live_bytes(self) -> int | None:
        return HELD if self.is_held else None


_STRATEGIES = {
    ShardingStrategy.NO_SHARD: Sharding(0, is_held=False),
    ShardingStrategy.FULL_SHARD: Sharding(3, is_held=False),
    ShardingStrategy.SHARD_GRAD_OP: Sharding(3, is_held=True),
    ShardingStrategy.HYBRID_SHARD: Sharding("hsdp", is_held=False),
    ShardingStrategy._HYBRID_SHARD_ZERO2: Sharding("hsdp", is_held=True),
}


def sharding_of(strategy: ShardingStrategy | None) -> Sharding:
    """The strategy's row of the table; FULL_SHARD where none is given, as in torch.

    >>> sharding_of(ShardingStrategy.SHARD_GRAD_OP)
    Sharding(stage=3, is_held=True)
    """
    found = _STRATEGIES.get(ShardingStrategy.FULL_SHARD if strategy is None else strategy)
    if found is None:
        names = ", ".join(each.name for each in _STRATEGIES)
        raise ValueError(f"sharding_strategy={strategy!r} is not known; choose a ShardingStrategy: {names}")
    return found


def mesh_of(
    strategy: ShardingStrategy | None, process_group: Any, device_mesh: DeviceMesh | None, device: torch.device
) -> DeviceMesh | None:
    """The ranks to shard over. A hybrid strategy without a mesh has one group for each machine."""
    is_hybrid = sharding_of(strategy).stage == "hsdp"
    if device_mesh is not None:
        if process_group is not None:
            raise ValueError("process_group and device_mesh both say over which ranks to shard: give device_mesh alone")
        if (device_mesh.ndim == 2) != is_hybrid:
            raise ValueError(
                f"device_mesh has {device_mesh.ndim} dimension(s): HYBRID_SHARD needs two (groups, ranks in a group), "
                "the other strategies one, for example device_mesh['shard']"
            )
        return device_mesh
    if isinstance(process_group, tuple):
        if not is_hybrid:
            raise ValueError("process_group is a pair of groups, which only HYBRID_SHARD takes: pass device_mesh=")
        inside = tuple(dist.get_process_group_ranks(process_group[0]))
        groups: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(groups, inside)
        return DeviceMesh(device.type, torch.tensor(sorted(set(groups))))
    if process_group is not None and process_group is not dist.group.WORLD:
        raise ValueError(
            "process_group: pass device_mesh=DeviceMesh(device_type, ranks) to shard over some of the ranks, or leave "
            "it out for all"
        )
    return _one_group_for_each_machine(device) if is_hybrid else None


def _one_group_for_each_machine(device: torch.device) -> DeviceMesh:
    world, local = dist.get_world_size(), os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or not int(local) or world % int(local):
        raise ValueError(
            f"HYBRID_SHARD shards inside each machine, and LOCAL_WORLD_SIZE={local!r} does not say how the {world} "
            "ranks lie on machines: start with torchrun, or pass device_mesh=init_device_mesh(device, (groups, ranks))"
        )
    return init_device_mesh(device.type, (world // int(local), int(local)))


def precision_of(given: MixedPrecision | None, model: nn.Module) -> Precision | None:
    """FSDP1's mixed precision. Gradients are reduced in param_dtype where reduce_dtype is not given, as in torch.

    >>> precision_of(MixedPrecision(param_dtype=torch.bfloat16), nn.Linear(8, 8)).reduction
    torch.bfloat16
    """
    if given is None:
        return None
    if not given.cast_root_forward_inputs and given.param_dtype is not None:
        raise ValueError(
            "MixedPrecision(cast_root_forward_inputs=False): the inputs of the model are always cast to param_dtype; "
            "leave it out"
        )
    if given.keep_low_precision_grads and given.param_dtype not in (None, torch.float32):
        warnings.warn(
            f"MixedPrecision(keep_low_precision_grads=True): gradients are reduced in {_wire(given)} and kept in fp32, "
            "as the optimizer updates fp32 masters",
            stacklevel=3,
        )
    keep: list[Keep] = []
    if given.param_dtype in (torch.bfloat16, torch.float16):
        classes = given._module_classes_to_ignore
        keep = [each for each in classes if any(isinstance(module, each) for module in model.modules())]
    return _precision(given.param_dtype, _wire(given), buffers=given.buffer_dtype, keep=keep)


def _wire(given: MixedPrecision) -> torch.dtype | None:
    return given.reduce_dtype or given.param_dtype


def precision_of_policy(given: MixedPrecisionPolicy, keep: list[Keep]) -> Precision:
    """FSDP2's policy; `keep` names the modules whose own policy leaves them in fp32."""
    return _precision(
        given.param_dtype, given.reduce_dtype or given.param_dtype, outputs=given.output_dtype, keep=keep or None
    )


def _precision(parameters: torch.dtype | None, reduction: torch.dtype | None, **others: Any) -> Precision:
    scale = LossScale(static=1.0) if parameters is torch.float16 else None  # FSDP leaves scaling to a GradScaler
    return Precision(parameters=parameters, reduction=reduction, loss_scale=scale, **others)


def offload_of(given: Iterable[Any], stage: int | str) -> dict[str, str] | None:
    """As offload= of zf.shard takes it, from the CPUOffload or OffloadPolicy of each module: with one that asks for it,
    all states go to host memory. Parameters that stay whole stay on the device.

    >>> offload_of([CPUOffloadPolicy()], 3), offload_of([None], 3)
    ({'optimizer': 'host', 'parameters': 'host'}, None)
    """
    asks = {isinstance(each, CPUOffloadPolicy) or bool(getattr(each, "offload_params", False)) for each in given}
    if True not in asks:
        return None
    if False in asks:
        warnings.warn("offload to the CPU was asked for some modules only: all of the model goes there", stacklevel=5)
    return {"optimizer": "host"} | ({"parameters": "host"} if row(stage).parameters.is_cut else {})


def check_nothing_is_ignored(**given: Iterable[Any] | None) -> None:
    for name, ignored in given.items():
        if ignored is not None and list(ignored):
            raise ValueError(
                f"{name}: every parameter of the module is sharded; keep what must stay whole in a module of its own "
                "outside the one that is wrapped"
            )


def move(module: nn.Module, device_id: int | torch.device | str | None) -> torch.device:
    """Brings a model on the CPU to the accelerator that FSDP would train it on; returns where it is then.

    Without device_id it goes to the current accelerator, unless the process group is gloo alone: then it stays.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    wanted: torch.device | None = None
    if isinstance(device_id, int):
        if accelerator is None:
            raise ValueError(f"device_id={device_id}, but this machine has no accelerator: leave it out")
        wanted = torch.device(accelerator.type, device_id)
    elif device_id is not None:
        wanted = torch.device(device_id)
    devices = {tensor.device for tensors in (module.parameters(), module.buffers()) for tensor in tensors}
    real = {device for device in devices if device.type != "meta"}
    if (
        wanted is None
        and accelerator is not None
        and all(d.type == "cpu" for d in real)
        and dist.get_backend() != "gloo"
    ):
        wanted = torch.device(accelerator.type, torch.accelerator.current_device_index())
    if wanted is not None and wanted.type != "cpu" and wanted.index is None:
        wanted = torch.device(wanted.type, torch.accelerator.current_device_index())
    if wanted is None:
        return next(iter(real), torch.device("cpu"))
    if any(device != wanted and device.type != "cpu" for device in real):
        raise ValueError(f"device_id={device_id!r}, but the model is on {', '.join(map(str, real))}: move it first")
    if any(device != wanted for device in real):
        _move(module, wanted)
    return wanted


def _move(module: nn.Module, device: torch.device) -> None:
    """What is on the meta device stays there: it gets its memory unit by unit."""
    nn.Module._apply(module, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
