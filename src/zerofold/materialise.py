"""A model on the meta device gets its values unit by unit: each is cut before the next one takes memory.

Values come from an init function, called for each module whose parameters or buffers have just got memory. Memory is
filled with a mark first, so that what the function leaves out is noticed and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        own = {id(entry.parameter) for slab in slabs for entry in slab.entries}
        fresh: list[tuple[str, Tensor]] = []
        for slab in slabs:
            for index in slab.unfilled:
                _mark(slab.parameters[index])
                fresh.append((slab.entries[index].name, slab.parameters[index]))
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = real = torch.empty_like(buffer, device=self._device)
                    _mark(real)
                    fresh.append((f"{self._names[module]}.{name}".lstrip("."), real))
        for module in modules:
            with _others_away(module, own):
                self._init(module)
        self._check(fresh)

    def _check(self, fresh: list[tuple[str, Tensor]]) -> None:
        left = [name for name, tensor in fresh if _is_marked(tensor)]
        if left:
            raise ValueError(
                f"'{left[0]}' was on the meta device and got no values ({len(left)} such tensor(s)): pass init=, a "
                "function that is called with each module and fills its parameters and buffers"
            )


def _own_init_of(model: nn.Module) -> Init:
    """Hugging Face's `_init_weights` of the innermost model around a module, else torch's `reset_parameters`."""
    around: dict[nn.Module, Init] = {}

    def look(module: nn.Module, init: Init | None) -> None:
        init = getattr(module, "_init_weights", None) or init
        if init is not None:
            around[module] = init
        for child in module.children():
            look(child, init)

    look(model, None)

    def run(module: nn.Module) -> None:
        for init in (around.get(module), _method(module, "reset_parameters"), _method(module, "_reset_parameters")):
            if init is not None:
                init(module)
                return

    return run


def _method(module: nn.Module, name: str) -> Init | None:
    method = getattr(module, name, None)
    return None if method is None else lambda _: method()


@contextmanager
def _others_away(module: nn.Module, own: set[int]) -> Iterator[None]:
    """Parameters of another unit that the same module holds must not be filled again: a stand-in takes their place."""
    away = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in own and not p.is_meta}
    for name, p in away.items():
        stand_in = torch.empty(p.shape, dtype=p.dtype, device="meta")
        module._parameters[name] = nn.Parameter(stand_in, requires_grad=p.requires_grad)
    try:
        yield
    finally:
        module._parameters.update(away)


def _mark(tensor: Tensor) -> None:
    if tensor.dtype is not torch.bool:  # two values leave no room for a mark
        tensor.detach().fill_(_mark_of(tensor))


def _is_marked(tensor: Tensor) -> bool:
    if tensor.dtype is torch.bool or not tensor.numel():
        return False
    values = tensor.detach()
    unset = values.isnan() if values.is_floating_point() or values.is_complex() else values == _mark_of(values)
    return bool(unset.any())


def _mark_of(tensor: Tensor) -> float | int:
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return torch.iinfo(tensor.dtype).max
