"""Parameters that a module uses though another one holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerofold.engine import Engine
from zerofold.sharded import ShardedParameter
from zerofold.unit import Unit

_ATTRIBUTE = "_zerofold_external"


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """From now on, whenever `module` runs, the unit of `parameter` is gathered too, and stays so until backward ends.

    Works before and after the model is prepared. Read the parameter from the module that holds it, during the forward.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.ModuleDict({"tokens": nn.Embedding(8, 4), "head": nn.Identity()})
    >>> register_external_parameter(model["head"], model["tokens"].weight)
    >>> unregister_external_parameter(model["head"], model["tokens"].weight)
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, (nn.Parameter, ShardedParameter)):
        raise TypeError(
            f"register_external_parameter takes a module and a parameter, not {type(module).__name__} and "
            f"{type(parameter).__name__}"
        )
    known: dict[int, _External] = vars(module).setdefault(_ATTRIBUTE, {})
    if not any(external.is_of(parameter) for external in known.values()):
        known[id(parameter)] = _External(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Takes it back."""
    known: dict[int, _External] = vars(module).get(_ATTRIBUTE, {})
    found = [key for key, external in known.items() if external.is_of(parameter)]
    if not found:
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} was not registered on {type(module).__name__}")
    for key in found:
        known.pop(key).remove()


class _External:
    def __init__(self, module: nn.Module, parameter: Tensor) -> None:
        self._parameter = parameter
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def is_of(self, parameter: Tensor) -> bool:
        """The same one, by either of its faces: outside its unit a module shows another than inside."""
        if parameter is self._parameter:
            return True
        engine = Engine.of_parameter(parameter)
        places = {} if engine is None else engine.places()
        return id(parameter) in places and places.get(id(self._parameter)) == places[id(parameter)]

    def _unit(self) -> tuple[Engine, Unit] | None:
        engine = Engine.of_parameter(self._parameter)
        if engine is None or not engine.row.parameters.is_cut:
            return None
        slab, _ = engine.places()[id(self._parameter)]
        (unit,) = [unit for unit in engine.schedule.units if slab in unit.slabs]
        return engine, unit

    def _before(self, *_: Any) -> None:
        found = self._unit()
        if found is not None:
            found[0].schedule.lend(found[1])

    def _after(self, *_: Any) -> None:
        found = self._unit()
        if found is not None and not torch.is_grad_enabled():
            found[0].schedule.take_back(found[1])
