"""Which parameters make a slab, which rank owns what, and how many bytes may be gathered at once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from zerofold.entry import Entry, Home, dtypes_of, lay_out
from zerofold.layout import balance
from zerofold.placement import Cut, Row, Tier, Tiers
from zerofold.plan.slabs import LARGE_ROOT_PARAMETER
from zerofold.precision import Dtypes, Precision
from zerofold.slab import Slab
from zerofold.slab_away import AwaySlab

Cost = Callable[[Tensor], float]
"""What updating a parameter costs, in any unit; the owners' sums are balanced."""


def split(unit: str, entries: list[Entry]) -> list[list[Entry]]:
    """The slabs of a unit: entries of the same dtypes and requires_grad together, in the order they came.

    A large parameter of the root is a slab by itself. Input and output embeddings get their gradients at opposite
    ends of backward; together they would have to wait for each other.
    """
    slabs: dict[tuple[Dtypes, bool, str], list[Entry]] = {}
    for entry in entries:
        p = entry.parameter
        alone = entry.name if not unit and p.nbytes >= LARGE_ROOT_PARAMETER else ""
        slabs.setdefault((dtypes_of(entry), p.requires_grad, alone), []).append(entry)
    return list(slabs.values())


def make_slabs(unit: str, entries: list[Entry], home: Home) -> list[Slab]:
    """With memory and this rank's values in it; `Slab.share` is yet to deal them out."""
    tiers = home.tiers.get(unit, Tiers())
    slabs: list[Slab] = []
    for part in split(unit, entries):
        is_away = tiers.of_shard(is_trained=part[0].parameter.requires_grad) is not Tier.DEVICE
        slabs.append((AwaySlab if is_away else Slab)(unit, part, home))
    return slabs


def choose_dtypes(model: nn.Module, assigned: dict[str, list[Entry]], precision: Precision) -> None:
    """Gives every entry its dtypes. Also again, for a parameter that begins to be trained."""
    kept = {module for outer in precision.kept_modules(model) for module in outer.modules()}
    for entry in (entry for unit in assigned.values() for entry in unit):
        inside = [module in kept for module, _ in entry.sites]
        if any(inside) and not all(inside):
            raise ValueError(
                f"Precision: '{entry.name}' is shared by a module that keep= keeps in fp32 and one that it does not; "
                "keep both or neither"
            )
        is_kept = any(inside) or precision.keeps(entry.name, entry.parameter)
        entry.dtypes = precision.dtypes(entry.parameter, is_kept=is_kept)


def choose_owners(assigned: dict[str, list[Entry]], row: Row, world: int, cost: Cost | None) -> None:
    """Gives every entry its owner, balanced over the whole model: trainable ones by cost, frozen ones by bytes."""
    if row.cut is not Cut.WHOLE:
        return  # the first rank, or nobody
    entries = [entry for unit in assigned.values() for entry in unit]
    for trainable in (True, False):
        some = [entry for entry in entries if entry.parameter.requires_grad is trainable]
        for entry, owner in zip(some, balance([_cost(e, cost) for e in some], world), strict=True):
            entry.owner = owner


def _cost(entry: Entry, cost: Cost | None) -> float:
    if cost is None or not entry.parameter.requires_grad:
        return float(entry.parameter.nbytes)
    found = cost(entry.parameter)
    if not isinstance(found, (int, float)) or not 0 <= found < float("inf"):
        raise ValueError(f"cost: {found} for '{entry.name}' is no cost; return a finite number of at least 0")
    return float(found)


def live_bound(assigned: dict[str, list[Entry]], row: Row, world: int, given: int | None) -> int:
    """How many gathered bytes may exist at once; by default what one unit needs, and one unit ahead."""

    def nbytes(entries: list[Entry]) -> int:
        return lay_out(entries, row, world).size * dtypes_of(entries[0]).compute.itemsize

    sizes = {name: sum(nbytes(part) for part in split(name, each)) for name, each in assigned.items()}

    def with_outer_units(name: str) -> int:
        return sum(size for outer, size in sizes.items() if outer in ("", name) or name.startswith(f"{outer}."))

    widest = max(sizes, key=with_outer_units)
    needed = with_outer_units(widest)
    if given is None:
        return needed + max((size for name, size in sizes.items() if name), default=0)
    if given < needed:
        raise ValueError(
            f"live_bytes={given} is too small: unit '{widest or 'root'}' with the units around it needs {needed} bytes "
            "gathered at once; raise the bound or choose smaller units"
        )
    return given
