"""A model on the meta device gets its values unit by unit: each is cut before the next one takes memory.

Values come from an init function, called for each module under which something has just got memory. That memory is
filled with a mark first, so that what the function leaves out is noticed and named. What has values already (a
pretrained part, a unit done before) is away meanwhile, with stand-ins on the meta device in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerofold.slab import Slab

Init = Callable[[nn.Module], None]


def on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


class Materialiser:
    """Runs the init function on the modules of one unit after another, outer units first."""

    def __init__(self, model: nn.Module, units: dict[str, nn.Module], device: torch.device, init: Init | None) -> None:
        self._device = device
        self._init = init or _own_init_of(model)
        self._names = {module: name for name, module in model.named_modules()}
        # What needs values: decided now, while everything without memory is still on the meta device.
        # A module may also fill what modules inside it hold, so it counts with them.
        self._empty = {module for module in self._names if on_meta(module)}
        self._by_unit: dict[str, list[nn.Module]] = {name: [] for name in ("", *units)}
        self._sort(model, "", {module: name for name, module in units.items()}, set())

    def _sort(self, module: nn.Module, unit: str, units: dict[nn.Module, str], seen: set[nn.Module]) -> None:
        """Children before their parents, as nn.Module.apply goes."""
        unit = units.get(module, unit)
        seen.add(module)
        for child in module.children():
            if child not in seen:
                self._sort(child, unit, units, seen)
        self._by_unit[unit].append(module)

    @torch.no_grad()
    def fill(self, unit: str, slabs: list[Slab]) -> None:
        """Values for the parameters of these slabs, whose memory is there, and for the buffers of their modules."""
        holders = {module: None for slab in slabs for entry in slab.entries for module, _ in entry.sites}
        modules = [module for module in {**dict.fromkeys(self._by_unit[unit]), **holders} if module in self._empty]
        parameters = {slab.entries[i].name: slab.parameters[i] for slab in slabs for i in slab.unfilled}
        places: list[tuple[nn.Module, str]] = []
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=self._device)
                    places.append((module, name))
        buffers = [tensor for module, name in places if (tensor := module._buffers[name]) is not None]
        fresh = {id(tensor) for tensor in (*parameters.values(), *buffers)}
        for tensor in (*parameters.values(), *buffers):
            _mark(tensor)
        for module in modules:
            if not any(id(tensor) in fresh for tensor in (*module.parameters(), *module.buffers())):
                continue  # all of it is going to be read from a file
            with _others_away(module, fresh):
                self._init(module)
        found = {f"{self._names[module]}.{name}".lstrip("."): module._buffers[name] for module, name in places}
        self._check({**parameters, **found})

    def _check(self, fresh: dict[str, Tensor | None]) -> None:
        left = [name for name, tensor in fresh.items() if tensor is None or tensor.is_meta or _is_marked(tensor)]
        if left:
            raise ValueError(
                f"'{left[0]}' was on the meta device and got no values ({len(left)} such tensor(s)): pass init=, a "
                "function that is called with each module and fills its parameters and buffers"
            )


def _own_init_of(model: nn.Module) -> Init:
    """Hugging Face's `_init_weights` of the innermost model around a module, else torch's `reset_parameters`.

    A PEFT layer then starts its adapters over in its own way: to the model around it they are ordinary layers.
    """
    around: dict[nn.Module, Init] = {}

    def look(module: nn.Module, init: Init | None) -> None:
        init = getattr(module, "_init_weights", None) or init
        if init is not None:
            around[module] = init
        for child in module.children():
            look(child, init)

    look(model, None)

    def run(module: nn.Module) -> None:
        ways = (around.get(module), _method(module, "reset_parameters"), _method(module, "_reset_parameters"))
        chosen = next((way for way in ways if way is not None), None)
        if chosen is not None:
            chosen(module)
        layer: Any = module
        if hasattr(module, "reset_lora_parameters"):
            for adapter in (*layer.lora_A, *layer.lora_embedding_A):
                layer.reset_lora_parameters(adapter, True)

    return run


def _method(module: nn.Module, name: str) -> Init | None:
    method = getattr(module, name, None)
    return None if method is None else lambda _: method()


@contextmanager
def _others_away(module: nn.Module, fresh: set[int]) -> Iterator[None]:
    """Under the module, stand-ins on the meta device take the place of everything that has values already."""
    away: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for inner in module.modules():
        held: list[dict[str, Tensor | None]] = [inner._parameters, inner._buffers]  # type: ignore[list-item]
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in fresh and not tensor.is_meta:
                    away.append((tensors, name, tensor))
                    stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    is_parameter = tensors is inner._parameters
                    tensors[name] = nn.Parameter(stand_in, tensor.requires_grad) if is_parameter else stand_in
    try:
        yield
    finally:
        for tensors, name, tensor in away:
            tensors[name] = tensor


def _mark(tensor: Tensor) -> None:
    if tensor.dtype is torch.bool:
        tensor.detach().view(torch.uint8).fill_(255)  # neither of its two values
    else:
        tensor.detach().fill_(_mark_of(tensor))


def _is_marked(tensor: Tensor) -> bool:
    values = tensor.detach()
    if not values.numel():
        return False
    if values.dtype is torch.bool:
        return bool(values.view(torch.uint8).max() > 1)
    if values.is_floating_point() or values.is_complex():
        return bool(values.sum().isnan())  # which one mark is enough for, and takes no memory of the same size
    return bool(values.max() == _mark_of(values))


def _mark_of(tensor: Tensor) -> float | int:
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return torch.iinfo(tensor.dtype).max
