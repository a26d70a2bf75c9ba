"""Leaf modules of DeepSpeed's stage 3: a module that is gathered as one, whatever inside it a forward uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from zerofold.units import UnitChoice, find_units

_FLAG = "_z3_leaf"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of these classes, given as classes or by name; returns them. `leaf_units` honours the marks.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    >>> set_z3_leaf_modules(model, ["LayerNorm"]) == [model[1]] == get_z3_leaf_modules(model)
    True
    >>> len(unset_z3_leaf_modules(model, [nn.LayerNorm])), get_z3_leaf_modules(model)
    (1, [])
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes the marks off again."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether this very module is marked."""
    return bool(getattr(module, _FLAG, False))


def leaf_units(model: nn.Module, choice: UnitChoice = None) -> UnitChoice:
    """What to pass as `units=` so that marked modules are gathered as one: `choice` itself where none is marked.

    A unit inside a leaf is given up, a leaf that no unit contains becomes one. Inside a unit a leaf is gathered as one
    already.

    >>> from torch import nn
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))
    >>> _ = set_z3_leaf_modules(model[1], [nn.Sequential])
    >>> list(find_units(model, nn.Linear)), list(find_units(model, leaf_units(model, nn.Linear)))
    (['0.0', '0.1', '1.0', '1.1'], ['0.0', '0.1', '1'])
    """
    leaves = get_z3_leaf_modules(model)
    if not leaves:
        return choice
    inside_leaf = {id(inner) for leaf in leaves for inner in leaf.modules() if inner is not leaf}
    units = [unit for unit in find_units(model, choice).values() if id(unit) not in inside_leaf]
    inside_unit = {id(inner) for unit in units for inner in unit.modules()}
    chosen = {id(module) for module in (*units, *(leaf for leaf in leaves if id(leaf) not in inside_unit))}
    picks: Callable[[str, nn.Module], bool] = lambda _, module: id(module) in chosen  # noqa: E731
    return picks


def _mark(
    model: nn.Module, classes: Iterable[type[nn.Module] | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    wanted = list(classes)
    for each in wanted:
        if not isinstance(each, (type, str)):
            raise TypeError(f"leaf_module_classes has {each!r}; give module classes or their names")
    found = [module for module in model.modules() if any(_is_of(module, each) for each in wanted)]
    if not found and raise_if_not_found:
        names = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"no module of the model is of class {wanted}; it has {', '.join(names)}")
    for module in found:
        setattr(module, _FLAG, flag)
    return found


def _is_of(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    if isinstance(wanted, str):
        kind = type(module)
        return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, wanted)
