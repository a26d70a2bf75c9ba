"""Which modules are units, and which unit each parameter belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from zerofold.entry import Entry

# Containers: nobody calls their forward, so nothing would gather their parameters.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

UnitChoice = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | int | None


def find_units(model: nn.Module, choice: UnitChoice) -> dict[str, nn.Module]:
    """Names and modules of the units inside `model`, in order of definition; the root is not among them.

    `choice`: None finds repeated blocks, a class (or several) or a predicate (name, module) picks modules, a number
    cuts the tree into modules of at least that many parameters.

    >>> from torch import nn
    >>> model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), "head": nn.Linear(8, 4)})
    >>> list(find_units(model, None)), list(find_units(model, nn.Linear))
    (['blocks.0', 'blocks.1'], ['blocks.0', 'blocks.1', 'head'])
    """
    if choice is None:
        return _repeated_blocks(model, "", sum(p.numel() for p in model.parameters()))
    # A wrapper that torch.compile has put around the whole model is the root, and so is what it holds.
    inside = {name: module for name, module in model.named_modules() if name and module is not _uncompiled(model)}
    if isinstance(choice, int) and not isinstance(choice, bool):
        if choice < 1:
            raise ValueError(f"units={choice} must be a number of parameters of at least 1")
        return _around_compiled(_by_size(model, inside, choice), inside)
    if isinstance(choice, type) or (isinstance(choice, tuple) and all(isinstance(c, type) for c in choice)):
        classes: Any = choice
        chosen = {name: module for name, module in inside.items() if isinstance(module, classes)}
        if not chosen:
            names = sorted({type(module).__name__ for module in inside.values()})
            raise ValueError(f"units={choice!r}: no module of the model is of that class; it has {', '.join(names)}")
    elif callable(choice) and not isinstance(choice, nn.Module):
        try:
            chosen = {name: module for name, module in inside.items() if choice(name, module)}
        except Exception as error:
            raise ValueError(
                f"units={choice!r} raised {type(error).__name__} ({error}): it is called as units(name, module) for "
                "every module of the model, and returns whether that is to be a unit"
            ) from error
    else:
        raise TypeError(
            f"units={choice!r} must be a module class, a tuple of them, a predicate (name, module) -> bool, "
            "a number of parameters, or None"
        )
    for name, module in chosen.items():
        if isinstance(module, _NEVER_CALLED):
            raise ValueError(
                f"units: '{name}' is a {type(module).__name__}, which is never called; choose what is in it"
            )
    chosen = _around_compiled(chosen, inside)
    return {name: module for name, module in chosen.items() if any(True for _ in module.parameters())}


def _around_compiled(chosen: dict[str, nn.Module], inside: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """In place of a module that torch.compile has wrapped, the wrapper: its hooks run before a graph is entered."""
    wrappers = {id(_uncompiled(module)): name for name, module in inside.items() if _uncompiled(module) is not module}
    names = [wrappers.get(id(module), name) for name, module in chosen.items()]
    return {name: inside[name] for name in names}


def _uncompiled(module: nn.Module) -> nn.Module:
    """The module behind a torch.compile wrapper, or the module itself."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def _kind(module: nn.Module) -> type[nn.Module]:
    """Its class; of what stands for a block that another rank of a pipeline has, the block's."""
    found = getattr(_uncompiled(module), "stands_for", None)
    return found if isinstance(found, type) else type(_uncompiled(module))


def _repeated_blocks(module: nn.Module, prefix: str, total: int, repeated: bool = False) -> dict[str, nn.Module]:
    """The outermost modules that a list repeats; `repeated` says that `module` is such a one which nobody calls.

    A Sequential that holds over a quarter of all is looked into further, for it always calls what is in it. Another
    module may choose, as a mixture of experts does, and ranks that choose differently would wait for each other.
    """
    found: dict[str, nn.Module] = {}
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    siblings = Counter(_kind(other) for other in module.children())
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        size = sum(p.numel() for p in child.parameters())
        if not size or "expert" in name.lower():
            continue
        is_repeated = repeated or (is_list and siblings[_kind(child)] > 1)
        if isinstance(child, _NEVER_CALLED):
            found.update(_repeated_blocks(child, f"{path}.", total, is_repeated))
            continue
        looks_further = not is_repeated or (isinstance(child, nn.Sequential) and size > total / 4)
        deeper = _repeated_blocks(child, f"{path}.", total) if looks_further else {}
        found.update(deeper if deeper or not is_repeated else {path: child})
    return found


def _by_size(model: nn.Module, inside: dict[str, nn.Module], minimum: int) -> dict[str, nn.Module]:
    """Bottom-up: a module becomes a unit when the parameters under it not yet in a unit reach the minimum."""
    chosen: dict[str, nn.Module] = {}
    for name, module in reversed(inside.items()):  # children come before their parents
        if isinstance(module, _NEVER_CALLED) or _is_read_by_attention(inside, name):
            continue
        taken = {id(p) for unit in chosen if unit.startswith(f"{name}.") for p in chosen[unit].parameters()}
        if sum(p.numel() for p in module.parameters() if id(p) not in taken) >= minimum:
            chosen[name] = module
    return {name: inside[name] for name in inside if name in chosen}


def _is_read_by_attention(inside: dict[str, nn.Module], name: str) -> bool:
    """torch's attention reads its output projection's weight without calling it."""
    parent = inside.get(name.rpartition(".")[0])
    return isinstance(parent, nn.MultiheadAttention)


def assign(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, list[Entry]]:
    """Each parameter's entry under its unit's name ("" is the root).

    A parameter held in several places belongs to the innermost unit that contains all of them.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    unit_names = {id(module): name for name, module in units.items()}
    entries: dict[int, Entry] = {}
    chains: dict[int, list[list[str]]] = {}  # for each place of a parameter, the units around it, innermost last
    for path, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is None or parameter.numel() == 0:
                continue  # zero-sized ones have nothing to cut and stay as they are
            name = f"{path}.{attribute}" if path else attribute
            entry = entries.setdefault(id(parameter), Entry(name, parameter))
            if (module, attribute) not in entry.sites:
                entry.sites.append((module, attribute))
            around = [modules[prefix] for prefix in _prefixes(path)]
            chain = [unit_names[id(outer)] for outer in around if id(outer) in unit_names]
            chains.setdefault(id(parameter), []).append(chain)
    assigned: dict[str, list[Entry]] = {"": [], **{name: [] for name in units}}
    for key, entry in entries.items():
        first, *others = chains[key]
        common = [unit for unit in first if all(unit in chain for chain in others)]
        assigned[common[-1] if common else ""].append(entry)
    return assigned


def names_of_modules(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every path at which each module of the model is found."""
    found: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(path)
    return found


def names_of_sites(entry: Entry, paths: dict[nn.Module, list[str]]) -> list[str]:
    """Every name of a parameter in the model as it is now."""
    places = [(path, attribute) for module, attribute in entry.sites for path in paths.get(module, ())]
    return [f"{path}.{attribute}".lstrip(".") for path, attribute in places]


def _prefixes(path: str) -> list[str]:
    """'a.b.c' → ['a', 'a.b', 'a.b.c']"""
    parts = path.split(".") if path else []
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
