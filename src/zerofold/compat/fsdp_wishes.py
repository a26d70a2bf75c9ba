"""Modules that are to be units of a model whose root is not known yet.

Blocks are wrapped before the model around them. So a wrapped module only notes the wish; the outermost one is sharded
with all of them, when it is certain that it is the outermost: when its parameters, its state or its forward are asked
for. A module that is wished to be a unit changes its class to one derived from its own, with the face's methods.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import nn

from zerofold.engine import Engine
from zerofold.nested import map_tensors
from zerofold.precision import Keep


@cache
def _derived(face: Any, own: Any) -> Any:
    """One class for all modules of a class, as torch.compile likes it. It has the name of its own class, which some
    models look at.
    """
    return type(own.__name__, (face, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


def give_face(module: nn.Module, face: type) -> None:
    """Adds the methods of `face` to the module by a class derived from both."""
    if not isinstance(module, face):
        own: Any = type(module)
        module.__class__ = _derived(face, own)


def take_face(module: nn.Module, *attributes: str) -> None:
    """The module has its own class again, and no longer the attributes that came with the other."""
    module.__class__ = type(module).__bases__[1]
    for name in attributes:
        vars(module).pop(name, None)


def refuse_call_from_outside(module: nn.Module, call: str) -> None:
    """Raises where another module's forward is calling this one, which then is not the outermost of the model.

    Sharded by itself it would train by itself, and an optimizer built on the model's parameters would not know.
    """
    inside = set(nn.Module.modules(module))
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") not in inside:
            caller = type(frame.f_locals.get("self")).__name__
            raise RuntimeError(
                f"this {type(module).__name__} is called by a {caller} that was not wrapped itself: call {call} on the "
                f"whole {caller} too, before its parameters are given to an optimizer"
            )
        frame = frame.f_back


def shown(found: Iterable[tuple[str, nn.Parameter]], engine: Engine) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters as an optimizer must hold them, also while they are gathered; inside `full_params`, as they are."""
    faces: dict[int, tuple[str, Any]] = {} if engine.schedule.holders else engine.faces()
    for name, parameter in found:
        yield name, faces[id(parameter)][1] if id(parameter) in faces else parameter


def kept_in_fp32(modules: set[nn.Module]) -> list[Keep]:
    """A rule of `zf.Precision` for modules whose own options leave them in fp32."""
    return [lambda name, it: it in modules] if modules else []


def cast_inputs(modules: Iterable[nn.Module], dtype: torch.dtype, engine: Engine) -> None:
    """Each of the modules gets its floating-point inputs in this dtype, until the model is closed.

    The model's own inputs are cast in any case.
    """

    def cast(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def to_dtype(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_tensors(to_dtype, args), map_tensors(to_dtype, kwargs)

    for module in modules:
        engine.on_close.append(module.register_forward_pre_hook(cast, with_kwargs=True).remove)
