"""Which stored tensor each parameter and buffer of a model gets its values from.

Names may differ by what stands around a model: torch.compile's and PEFT's wrappers, and the prefix that Hugging Face
puts before the base model inside one with a head. Tied parameters are one parameter with several names: any will do.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zerofold.checkpoint.boxes import own_part, whole_shape
from zerofold.checkpoint.contents import Contents, Stored, clean, numel
from zerofold.comm import Comm
from zerofold.entry import Entry
from zerofold.part import part_of

_PEFT_ROOT = "base_model.model."
_PEFT_LAYERS = frozenset({"base_layer", "original_module"})


def names_in_files(name: str, prefix: str = "") -> Iterator[str]:
    """Under which names a tensor of the model may be stored, the best first.

    >>> list(names_in_files("_orig_mod.model.norm.weight", "model"))
    ['model.norm.weight', 'norm.weight']
    >>> list(names_in_files("base_model.model.model.layers.0.q_proj.base_layer.weight"))[-1]
    'model.layers.0.q_proj.weight'
    """
    plain = clean(name)
    yield plain
    bare = _without_peft(plain)
    if bare != plain:
        yield bare
    if prefix:
        yield bare.removeprefix(f"{prefix}.") if bare.startswith(f"{prefix}.") else f"{prefix}.{bare}"


def _without_peft(name: str) -> str:
    parts = name.removeprefix(_PEFT_ROOT).split(".")
    for place, part in enumerate(parts):
        if part == "modules_to_save":  # followed by the adapter's name
            parts = parts[:place] + parts[place + 2 :]
            break
    return ".".join(part for part in parts if part not in _PEFT_LAYERS)


def prefix_of(model: nn.Module) -> str:
    """Hugging Face's, of the base model inside one with a head."""
    prefix = getattr(model, "base_model_prefix", "")
    return prefix if isinstance(prefix, str) else ""


def known_in_files(model: nn.Module) -> set[str]:
    """Every name that a tensor of this model may be stored under."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {known for name, _ in tensors for known in names_in_files(name, prefix_of(model))}


def names_elsewhere(others: Comm | None, known: set[str]) -> frozenset[str]:
    """What the other ranks that hold this model between them know: a stage of a pipeline has no use for it, and yet it
    has its place. All of these ranks must call it.
    """
    if others is None:
        return frozenset()
    return frozenset().union(*others.all_gather_objects(known, unit="names"))


def choose_sources(
    model: nn.Module,
    assigned: dict[str, list[Entry]],
    contents: Contents,
    *,
    has_init: bool,
    warns: bool,
    elsewhere: frozenset[str] = frozenset(),
) -> None:
    """Gives every entry the stored tensor of its name, and checks that nothing is missing or of another shape.

    A parameter that is not stored keeps the values it has, or gets those of an init function that was given. Of one
    that is cut over a tensor axis, the entry gets this rank's part.
    """
    files = _Names(model, contents, elsewhere)
    entries = [entry for unit in assigned.values() for entry in unit]
    for entry in entries:
        found = files.find(entry.parameter)
        if found is not None:
            check_fits(entry.name, entry.parameter, found, contents.where)
        entry.source = None if found is None else own_part(found, entry.part)
    missing, unused = [entry for entry in entries if entry.source is None], files.unused()
    if len(missing) == len(entries):
        stored = next(iter(contents.tensors), "nothing")
        raise ValueError(
            f"load={contents.where} holds none of the model's parameters: it has '{stored}', the model "
            f"'{clean(entries[0].name)}'; is it another model's?"
        )
    # Adapters are never in the file of what they adapt; their layers know how to begin.
    missing = [entry for entry in missing if not (hasattr(model, "peft_config") and entry.parameter.requires_grad)]
    empty = [entry for entry in missing if entry.parameter.is_meta]
    if empty and not has_init:
        other = f"; '{unused[0]}' is there and has no place in the model" if unused else ""
        raise ValueError(
            f"'{empty[0].name}' is not in {contents.where} ({len(empty)} of {len(entries)} parameters are missing) and "
            f"has no values{other}. If it is meant to be new, pass init=, a function that fills the parameters of one "
            "module"
        )
    if warns and missing:
        origin = "get their values from init=" if empty else "keep the values they have"
        _warn(f"{len(missing)} parameter(s) are not in {contents.where} and {origin}", (e.name for e in missing))
    if warns and unused:
        _warn(f"{contents.where} holds {len(unused)} tensor(s) that the model has no use for", unused)


def load_buffers(model: nn.Module, contents: Contents, device: torch.device) -> None:
    """Persistent buffers that are stored, on every rank: they are whole everywhere."""
    files = _Names(model, contents, frozenset())
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            found = files.find(buffer)
            if found is None:
                continue
            check_fits(f"{path}.{name}".lstrip("."), buffer, found, contents.where)
            values = found.read(0, numel(found)).view(found.shape)
            if buffer.is_meta:
                module._buffers[name] = values.to(device=device, dtype=buffer.dtype)
            else:
                buffer.copy_(values)


def check_fits(name: str, tensor: Tensor, stored: Stored, where: str) -> None:
    """Shapes must be equal; dtypes of one kind, since only these can be converted without another meaning."""
    shape = whole_shape(tensor)
    if shape != stored.shape:
        raise ValueError(
            f"'{name}' has shape {shape}, in {where} it has {stored.shape}: build the model with the "
            "config it was saved with"
        )
    if _kind(tensor.dtype) != _kind(stored.dtype):
        raise ValueError(
            f"'{name}' is {tensor.dtype}, in {where} it is {stored.dtype}, which holds another kind of numbers "
            "(quantised weights, for instance): store it as a plain floating-point tensor first"
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "quantised" if dtype.itemsize == 1 else "floating"
    return "complex" if dtype.is_complex else "integer"


class _Names:
    """The names of a model's tensors, in the model and in files."""

    def __init__(self, model: nn.Module, contents: Contents, elsewhere: frozenset[str]) -> None:
        self._model, self._contents, self._elsewhere = model, contents, elsewhere
        self._prefix = prefix_of(model)
        self._of: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._of.setdefault(id(tensor), []).append(f"{path}.{name}".lstrip("."))

    def find(self, tensor: Tensor) -> Stored | None:
        part = part_of(tensor)
        names = [*([] if part is None or part.name is None else [part.name]), *self._of[id(tensor)]]
        ways = [list(names_in_files(name, self._prefix)) for name in names]
        return self._contents.tensor(*(way[0] for way in ways), *(name for way in ways for name in way[1:]))

    def unused(self) -> list[str]:
        """Stored tensors under no name of the model, but for those that its class says may be there."""
        known = {name for names in self._of.values() for each in names for name in names_in_files(each, self._prefix)}
        ignored: Any = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()
        known |= self._elsewhere
        left = [name for name in self._contents.tensors if name not in known]
        return [name for name in left if not any(re.search(pattern, name) for pattern in ignored)]


def _warn(what: str, names: Iterable[str]) -> None:
    found = list(names)
    warnings.warn(f"{what}: {', '.join(found[:3])}{', …' if len(found) > 3 else ''}", stacklevel=5)
