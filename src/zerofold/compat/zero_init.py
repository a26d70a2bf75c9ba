"""zero.Init: a model is cut over the ranks while it is being built, so that none ever holds all of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from itertools import count
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from zerofold.comm import Comm
from zerofold.config import read
from zerofold.cutting import can_be_cut, cut_alone
from zerofold.process_group import group_device, join_or_be_alone
from zerofold.shard_spec import Loose
from zerofold.traffic import Traffic

_KEPT_ELSEWHERE = ("none", "cpu")


class Init:
    """Inside, the parameters of a module are cut over the ranks as soon as it is handed to the module around it.

    What is left (the model's own parameters) is cut at the end. All ranks build the same model; rank 0's values count.
    A parameter that is cut has its true shape, and is the same object as before: tied weights stay tied, attributes
    stay. Random initialisers (`nn.init.normal_` and so on) and elementwise changes work on it; anything else inside
    `GatheredParameters`. `zf.prepare`, `zf.shard` and `zf.initialize` take such a model, at any stage, one unit after
    another.

    module                 an existing module, cut at once
    data_parallel_group    the ranks to cut over; all by default. `mpu` may name them, by get_data_parallel_group()
    remote_device          "cpu" keeps the pieces in host memory; else they go to the accelerator, where there is one
    config_dict_or_path    or `config`: a DeepSpeed config. It is not needed here: precision and offload are up to
                           whoever prepares the model
    enabled                False does nothing; neither does an Init inside another
    dtype                  of the floating-point parameters. By default they keep the one they are built in: masters
                           are made from them, so casting them to 16 bits here, as DeepSpeed does, would round the
                           weights

    mem_efficient_linear and pin_memory are taken and have no use: weights of a unit are whole while it runs, and
    pieces are copied once.

    >>> import torch, zerofold as zf
    >>> from zerofold.compat.zero_init import Init
    >>> with Init():
    ...     model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    >>> model[1].weight
    ShardedParameter('Linear.weight', shape=(8, 64), dtype=torch.float32, this rank holds elements 0:512)
    >>> model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3)
    >>> zf.close(model)
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | torch.device | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: dist.ProcessGroup | None = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        given = config if config_dict_or_path is None else config_dict_or_path
        if given is not None:
            read(given)  # which says what is wrong with it
        refused = {
            "zero_quantized_weights": (zero_quantized_weights, "parameters are gathered in their compute dtype"),
            "zero_quantized_nontrainable_weights": (
                zero_quantized_nontrainable_weights,
                "they are not quantised",
            ),
            "zero_param_parallel_group": (zero_param_parallel_group, 'choose stage="hpz" with a mesh when you prepare'),
            "param_swapper": (param_swapper, "pieces stay in memory"),
        }
        for name, (value, why) in refused.items():
            if value:
                raise ValueError(f"zero.Init: {name}={value!r} is not offered: {why}; leave it out")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"zero.Init: dtype={dtype!r} must be a floating-point torch.dtype, or None")
        if remote_device is not None and torch.device("cpu") != remote_device and remote_device not in _KEPT_ELSEWHERE:
            raise ValueError(f"zero.Init: remote_device={str(remote_device)!r} is not offered; use 'cpu', or None")
        self.enabled, self._dtype = enabled, dtype
        self._keeps_on_host = str(remote_device) == "cpu"
        self._given = data_parallel_group or sequence_data_parallel_group
        if self._given is None and mpu is not None:
            self._given = mpu.get_data_parallel_group()
        self._comm: Comm | None = None
        self._handles: list[RemovableHandle] = []
        self._modules: dict[nn.Module, None] = {}  # with parameters, in the order they were built
        self._started, self._numbers = 0, count()
        if enabled and module is not None:
            if not isinstance(module, nn.Module):
                raise TypeError(f"zero.Init: module must be a torch.nn.Module, not {type(module).__name__}")
            self._begin()
            self._cut(module.modules())

    def __enter__(self) -> Init:
        if self.enabled and not _is_inside_another():
            self._begin()
            self._handles = [
                register_module_parameter_registration_hook(self._parameter_comes),
                register_module_module_registration_hook(self._module_comes),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        modules, self._handles, self._modules = list(self._modules), [], {}
        if error is None:
            self._cut(modules)

    def _begin(self) -> None:
        join_or_be_alone()
        group = self._given or dist.group.WORLD
        assert group is not None
        device = torch.device("cpu") if self._keeps_on_host else group_device(group)
        self._comm = Comm(group, device, Traffic(), overlap=True, name="zero.Init")
        # Parameters of several contexts are put in one order by the time at which rank 0 entered each.
        started = torch.tensor(time.time_ns(), device=device)
        self._comm.broadcast(started, 0, unit="zero.Init").wait()
        self._started = int(started.item())

    def _parameter_comes(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # Held until the end: were one collected before on some ranks only, the others would wait for it.
        self._modules[module] = None

    def _module_comes(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if isinstance(module, _Question):
            module.is_answered = True
        elif module is not None:
            self._cut(module.modules())

    def _cut(self, modules: Iterable[nn.Module]) -> None:
        assert self._comm is not None
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and can_be_cut(parameter):
                    loose = Loose(self._started, next(self._numbers), self._numbers)
                    cut_alone(parameter, f"{type(module).__name__}.{name}", loose, self._comm, dtype=self._dtype)


class _Question(nn.Module):
    """Put to whoever watches modules being built: is a zero.Init among you?"""

    is_answered = False


def _is_inside_another() -> bool:
    question = _Question()
    nn.Module().add_module("question", question)
    return question.is_answered
