"""get_accelerator(): the device of this process behind DeepSpeed's method names."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor


class Accelerator:
    """One kind of device, and torch's module for it.

    What DeepSpeed names and torch does too (synchronize, empty_cache, memory_allocated, Stream, Event, manual_seed, …)
    is torch's own; `torch.cpu` has no memory figures, and those answer 0.
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._module: Any = getattr(torch, kind)
        self._communication_backend_name = "nccl" if kind == "cuda" else "gloo"

    def device_name(self, device_index: int | None = None) -> str:
        has_index = self._name != "cpu" and device_index is not None
        return f"{self._name}:{device_index}" if has_index else self._name

    def device(self, device_index: int | None = None) -> Any:
        return self._module.device(device_index) if self._name == "cuda" else torch.device(self.device_name())

    def current_device(self) -> int | str:
        return "cpu" if self._name == "cpu" else int(torch.accelerator.current_device_index())

    def current_device_name(self) -> str:
        return "cpu" if self._name == "cpu" else self.device_name(int(torch.accelerator.current_device_index()))

    def set_device(self, device_index: int) -> None:
        if self._name != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        # DeepSpeed's CPU counts the ranks of a node as its devices.
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return local if self._name == "cpu" else int(torch.accelerator.device_count())

    def is_available(self) -> bool:
        return self._name == "cpu" or torch.accelerator.is_available()

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state() if self._name == "cpu" else self._of_device("get_rng_state", device_index)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if self._name == "cpu":
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, *([] if device_index is None else [device_index]))

    def total_memory(self, device_index: int | None = None) -> int:
        if self._name == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(self._of_device("mem_get_info", device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        if self._name == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return int(self._of_device("mem_get_info", device_index)[0])

    def _of_device(self, name: str, device_index: int | None) -> Any:
        return getattr(self._module, name)(*([] if device_index is None else [device_index]))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name, None)
        if found is not None:
            return found
        if self._name == "cpu" and (name.startswith(("memory_", "max_memory_", "reset_", "empty_cache"))):
            return lambda *_: 0
        raise AttributeError(f"get_accelerator().{name}: neither the zerofold stand-in nor torch.{self._name} has it")


@cache
def _accelerator(kind: str) -> Accelerator:
    return Accelerator(kind)


def get_accelerator() -> Accelerator:
    """The accelerator of this machine, or the CPU; DS_ACCELERATOR=cpu asks for the CPU.

    >>> get_accelerator().communication_backend_name() in ("gloo", "nccl")
    True
    """
    asked = os.environ.get("DS_ACCELERATOR")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = asked or (found.type if found is not None else "cpu")
    if not hasattr(torch, kind):
        raise ValueError(f"DS_ACCELERATOR={asked!r}: torch has no such device; use cpu, cuda, or leave it unset")
    return _accelerator(kind)


def is_current_accelerator_supported() -> bool:
    return get_accelerator().is_available()
