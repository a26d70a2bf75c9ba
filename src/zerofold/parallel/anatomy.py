"""Which modules of a model are its row of blocks, and which run before it and after it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from zerofold.nested import map_tensors, tensors_in
from zerofold.parallel.stand_ins import in_form, show_plain_attributes, stream_of
from zerofold.units import find_units

Example = Mapping[str, Any] | tuple[Any, ...]

_LENGTHS = (None, 1, 2, 3)
"""Of what a block may return: the stream itself, or a tuple with the stream in front."""


@dataclass(frozen=True)
class Anatomy:
    """Modules by name. What runs before and after are those that hold parameters themselves."""

    blocks: dict[str, nn.Module]
    before: dict[str, nn.Module]
    after: dict[str, nn.Module]
    length_of_output: int | None
    """Of the tuple that a block returns; None where it returns the stream itself."""


def read_anatomy(model: nn.Module, example: Example | None) -> Anatomy:
    """Runs the model once without its blocks, on tensors without memory, and looks what is called when.

    `example` are arguments for it; by default two tokens.
    """
    blocks = _one_row(model)
    inside = {module for block in blocks.values() for module in block.modules()}
    holders = {
        name: module
        for name, module in model.named_modules()
        if module not in inside and any(p is not None and p.numel() for p in module._parameters.values())
    }
    for name, module in holders.items():
        if any(block in set(module.modules()) for block in blocks.values()):
            attribute = next(key for key, p in module._parameters.items() if p is not None and p.numel())
            path = f"{name}.{attribute}".lstrip(".")
            raise ValueError(
                f"pipeline: '{path}' is a parameter of a {type(module).__name__}, which runs on every stage: hold it "
                "in a module of its own that is called before the blocks, or after them"
            )
    seen = _run(model, blocks, holders, example)
    between = [name for name in holders if name in seen.between]
    if between:
        raise ValueError(
            f"pipeline: '{between[0]}' has parameters and is called between the blocks, so no stage can have it alone: "
            "make it a part of the blocks"
        )
    both = [name for name in holders if name in seen.before & seen.after]
    if both:
        raise ValueError(
            f"pipeline: '{both[0]}' has parameters and is called before the blocks and after them, which are on two "
            "stages: make two modules of it"
        )
    before = {name: module for name, module in holders.items() if name in seen.before}
    after = {name: module for name, module in holders.items() if name not in before}
    return Anatomy(blocks, before, after, seen.length_of_output)


def _one_row(model: nn.Module) -> dict[str, nn.Module]:
    blocks = find_units(model, None)
    lists = list(dict.fromkeys(name.rpartition(".")[0] for name in blocks))
    shared = _shared_in_a_list(model)
    if shared is not None and len(lists) > 1:
        raise ValueError(
            f"pipeline: '{shared[1]}' is also '{shared[0]}', and modules that share a weight are not taken for a row "
            "of blocks: untie them"
        )
    if len(lists) > 1:
        raise ValueError(
            f"pipeline: {type(model).__name__} has its blocks in {len(lists)} lists ({', '.join(lists)}), and one "
            "stream cannot pass through both: a pipeline needs a model with one row of blocks"
        )
    if len(blocks) < 2 or len({id(block) for block in blocks.values()}) < len(blocks):
        raise ValueError(
            f"pipeline: no row of blocks was found in {type(model).__name__}: it needs a ModuleList or Sequential of "
            "modules of one class, each once"
        )
    return blocks


def _shared_in_a_list(model: nn.Module) -> tuple[str, str] | None:
    """Two names of one parameter, under two members of one list of modules."""
    found: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = found.setdefault(id(parameter), name)
        lists = [each.split(".") for each in (first, name)]
        heads = [list(takewhile(lambda part: not part.isdigit(), parts)) for parts in lists]
        if first != name and heads[0] == heads[1] and all(map(len, heads)) and heads[0] != lists[0]:
            return first, name
    return None


class _Seen:
    """What was called, in its order."""

    def __init__(self, blocks: list[str], length_of_output: int | None) -> None:
        self.blocks = blocks
        self.calls: list[str] = []  # of blocks, in their order
        self.before: set[str] = set()
        self.between: set[str] = set()
        self.after: set[str] = set()
        self.shapes: set[torch.Size] = set()  # of what blocks are given
        self.length_of_output = length_of_output

    @property
    def is_plausible(self) -> bool:
        """Every block was given the stream: a model that takes their output apart changes a tensor's shape by that."""
        return sorted(self.calls) == sorted(self.blocks) and len(self.shapes) == 1

    def pass_on(self, name: str, stream: Tensor, others: list[Tensor]) -> Tensor:
        self.calls.append(name)
        self.shapes.add(stream.shape)
        return stream

    def note(self, name: str, module: nn.Module, args: Any) -> None:
        if not self.calls:
            self.before.add(name)
        else:
            (self.between if len(self.calls) < len(self.blocks) else self.after).add(name)


PassOn = Callable[[str, Tensor, list[Tensor]], Tensor]
"""(name of a block, the stream it is given, other tensors it is given) -> what it gives in its place."""


class Recorder(nn.Module):
    """In the place of a block."""

    def __init__(self, name: str, block: nn.Module, pass_on: PassOn, length_of_output: int | None) -> None:
        super().__init__()
        self.name, self.pass_on, self.length_of_output = name, pass_on, length_of_output
        show_plain_attributes(block, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stream = stream_of(self.name, args, kwargs)
        others = [tensor for tensor in tensors_in((args, kwargs)) if tensor is not stream]
        return in_form(self.pass_on(self.name, stream, others), self.length_of_output)


def _run(
    model: nn.Module, blocks: dict[str, nn.Module], holders: dict[str, nn.Module], example: Example | None
) -> _Seen:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        args, kwargs = fake_arguments(model, example)
        tries = [_pass(model, blocks, holders, args, kwargs, length) for length in _LENGTHS]
    seen, error = next((tried for tried in tries if tried[0].is_plausible), tries[0])
    if not seen.is_plausible:
        ended = [each.calls for each, failed in tries if failed is None and len(each.shapes) == 1]
        _check_each_once(list(blocks), ended)
    unseen = [name for name in holders if name not in seen.before | seen.between | seen.after]
    if (error is not None and unseen) or not seen.is_plausible:
        given = "the example=" if example is not None else "two tokens"
        raise ValueError(
            f"pipeline: cannot see which modules of {type(model).__name__} run before its blocks and which after: it "
            f"does not run on {given} without them{_said(error)}; pass example=, a tuple or dict of arguments"
        ) from error
    odd = next(((named, called) for named, called in zip(blocks, seen.calls, strict=True) if named != called), None)
    if odd is not None:
        raise ValueError(
            f"pipeline: the model calls '{odd[1]}' where '{odd[0]}' is next in its list of blocks: stages are cut by "
            "the order of the list, so list the blocks in the order in which they are called"
        )
    return seen


def _check_each_once(blocks: list[str], runs: list[list[str]]) -> None:
    """Of passes to the model's end."""
    for calls in runs[:1]:
        for name in blocks:
            if calls.count(name) != 1:
                raise ValueError(
                    f"pipeline: the model's forward calls '{name}' {calls.count(name)} times: every block must be "
                    "called once; give what is called again a list of its own, and leave out of the list what is not "
                    "called"
                )


def _pass(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    holders: dict[str, nn.Module],
    args: Any,
    kwargs: Any,
    length: int | None,
) -> tuple[_Seen, Exception | None]:
    seen = _Seen(list(blocks), length)
    try:
        run_without_blocks(model, blocks, seen.pass_on, length, args, kwargs, watching=_noting(seen, holders))
        return seen, None
    except Exception as error:
        return seen, error


@contextmanager
def _noting(seen: _Seen, holders: dict[str, nn.Module]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(partial(seen.note, name)) for name, module in holders.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_without_blocks(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    pass_on: PassOn,
    length: int | None,
    args: Any,
    kwargs: Any,
    *,
    watching: AbstractContextManager[None],
) -> Any:
    """What the model returns, on tensors without memory and without its hooks; `watching` may put on others."""
    others: dict[nn.Module, nn.Module] = {
        block: Recorder(name, block, pass_on, length) for name, block in blocks.items()
    }
    with _without_hooks(model), _without(model, others), _unlogged(), watching:
        return functional_call(model, _without_memory(model), args, kwargs)


@contextmanager
def _unlogged() -> Iterator[None]:
    """torch logs an operation that fails without memory, with a traceback; here that is an answer, and no error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_drop)
    try:
        yield
    finally:
        logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Nobody is to notice the pass. Hooks of tensor parallelism would talk to other ranks about tensors without memory;
    a module that is cut runs on its own piece as well, and what it gives is thrown away.
    """
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    held = [(module, kind, dict(getattr(module, kind))) for module in model.modules() for kind in kinds]
    for module, kind, _ in held:
        getattr(module, kind).clear()
    try:
        yield
    finally:
        for module, kind, hooks in held:
            getattr(module, kind).update(hooks)


def _said(error: Exception | None) -> str:
    lines = str(error).splitlines()
    return "" if error is None else f" ({type(error).__name__}: {lines[0] if lines else ''})"


def _without_memory(module: nn.Module) -> dict[str, Tensor]:
    """On the CPU, as far as anybody can tell: models ask for devices' names."""
    held = [*module.named_parameters(), *module.named_buffers()]
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in held}


@contextmanager
def _without(model: nn.Module, others: dict[nn.Module, nn.Module]) -> Iterator[None]:
    places = places_of(model, set(others))
    for module, seats in places.items():
        for parent, name in seats:
            parent._modules[name] = others[module]
    try:
        yield
    finally:
        for module, seats in places.items():
            for parent, name in seats:
                parent._modules[name] = module


def places_of(model: nn.Module, wanted: set[nn.Module]) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Every parent and name under which each of the modules is found."""
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {module: [] for module in wanted}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and child in wanted:
                found[child].append((parent, name))
    return found


def fake_arguments(model: nn.Module, example: Example | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example is not None:
        args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
        return map_tensors(_fake, args), map_tensors(_fake, kwargs)
    parameters = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    needed = sum(parameter.default is parameter.empty for parameter in parameters)
    return tuple(torch.zeros((1, 2), dtype=torch.long) for _ in range(max(1, needed))), {}


def _fake(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
