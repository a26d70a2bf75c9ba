"""A device that computes nothing and takes its time: every operation costs what its bytes and arithmetic need.

    seconds of a kernel = a gap + the larger of  flops / rate that products attain  and  bytes / rate of the memory

The figures are those of the plan (`plan.compute`).
Operations that only look at memory in another way cost nothing. Tensors may be on the meta device: then numbers that
a program asks for are 1 (a norm that needs no clipping, a flag that all ranks agree on).
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from zerofold.plan.compute import ATTAINED, KERNEL_GAP
from zerofold.plan.machine import Machine
from zerofold.plan.tracing.kernels import DeviceKernels
from zerofold.simulation.clocks import VirtualClock
from zerofold.simulation.memory import LiveBytes, tensors_in

_aten = torch.ops.aten
# fmt: off
_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "detach", "detach_",
    "alias", "lift_fresh", "is_same_size", "_unsafe_view", "_reshape_alias", "record_stream", "scalar_tensor",
    "sym_size", "sym_numel", "sym_stride", "_version", "item", "is_pinned",
}
_WRITE_ONLY = {"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "_foreach_copy_", "_foreach_zero_"}
_ROWS = {"embedding", "index", "index_select", "gather"}  # read as much as they write, whatever they choose from
# fmt: on
# Their schema allows it, for a scale that nobody passes here.
_READ_ONLY = {("_fused_adamw_", "grads"), ("_fused_adam_", "grads")}


class ModelledDevice(TorchDispatchMode):
    """While it is entered, operations on its kind of device move the virtual clock and are counted in `live`."""

    def __init__(self, machine: Machine, clock: VirtualClock, device: torch.device) -> None:
        super().__init__()
        self.machine, self.clock, self.live = machine, clock, LiveBytes(device.type)
        self.flops = 0.0
        self._device_type = device.type
        self._kernels = ExitStack()

    def __enter__(self) -> Any:
        if self._device_type == "meta":
            self._kernels.enter_context(DeviceKernels("cuda"))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # it takes itself apart; what it is made of comes here
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].device.type == self._device_type:
            if not self.clock.is_paused:
                self.clock.synchronize()
            if args[0].is_meta:
                return _ones(args[0].dtype)
        result = func(*args, **kwargs)
        inputs, outputs = tensors_in(args) + tensors_in(list(kwargs.values())), tensors_in(result)
        if not any(tensor.device.type == self._device_type for tensor in inputs + outputs):
            return result
        for tensor in inputs + outputs:
            self.live.see(tensor)
        if not self.clock.is_paused:
            self._run(func, args, kwargs, result, inputs, outputs)
        return result

    def _run(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        if _is_free(func):
            return
        flops = 0.0
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            flops = float(count(*args, **kwargs, out_val=result))
            self.flops += flops
        rate = self.machine.flops if (outputs or inputs)[0].element_size() <= 2 else self.machine.flops_fp32
        moved = _bytes_moved(func, args, kwargs, inputs, outputs)
        seconds = max(flops / (ATTAINED * rate), moved / self.machine.memory_rate)
        self.clock.compute(KERNEL_GAP + seconds, launch=self.machine.kernel_seconds)


_PLAIN = (Tensor, torch.nn.Parameter)


@cache
def _is_free(func: Any) -> bool:
    """Views, and what launches no kernel."""
    name = func._overloadpacket.__name__
    returns = func._schema.returns
    is_view = bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return is_view or name in _FREE


@cache
def _written_arguments(func: Any) -> frozenset[tuple[int, str]]:
    """Place and name of the arguments that the operation changes."""
    name = func._overloadpacket.__name__
    found = [(place, each.name) for place, each in enumerate(func._schema.arguments) if _is_written(each)]
    return frozenset(each for each in found if (name, each[1]) not in _READ_ONLY)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _bytes_moved(func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> float:
    name = func._overloadpacket.__name__
    changed: list[Tensor] = []
    for place, argument in _written_arguments(func):
        changed += tensors_in(args[place] if place < len(args) else kwargs.get(argument))
    by_id = {id(tensor) for tensor in changed}
    made = [tensor for tensor in outputs if id(tensor) not in by_id]
    written = sum(map(_nbytes, made)) + sum(map(_nbytes, changed))
    if name in _ROWS:
        return 2.0 * written
    is_read_first = name not in _WRITE_ONLY and not func._overloadname.endswith("out")
    read = inputs if is_read_first else [each for each in inputs if id(each) not in by_id]
    return float(written + sum(map(_nbytes, read)))


def _nbytes(tensor: Tensor) -> int:
    """An expanded tensor is no more than what it is expanded from."""
    return min(tensor.numel() * tensor.element_size(), max(tensor.untyped_storage().nbytes(), 1))


def _ones(dtype: torch.dtype) -> bool | int | float:
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
