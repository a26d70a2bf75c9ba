"""Where the three states of a unit live: over which ranks, and in which memory.

A ZeRO stage is a row of the table at the end, never a branch elsewhere.

The ranks form a mesh of two axes: ranks INSIDE a group, and the groups ACROSS each other. One group holding all
ranks is the ordinary case; then the axis ACROSS has size 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

ACROSS, INSIDE = "across", "inside"
AXES = (ACROSS, INSIDE)


class Cut(Enum):
    """How a state is divided among the ranks that share it."""

    EVEN = "even"  # equal ranges of the flat space, whatever parameters they cut through
    WHOLE = "whole"  # whole parameters, each with one owner
    FIRST = "first"  # whole parameters, all owned by the first rank


class Tier(Enum):
    """Which memory a state is in while nobody uses it."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True)
class Tiers:
    """Where the three states of one unit live; different units may choose differently.

    >>> Tiers().is_offloaded, Tiers(optimizer=Tier.HOST).is_offloaded
    (False, True)
    """

    optimizer: Tier = Tier.DEVICE  # masters and moments
    gradients: Tier = Tier.DEVICE  # from the end of a unit's backward to the update
    parameters: Tier = Tier.DEVICE  # what forward computes with, between uses

    @property
    def is_offloaded(self) -> bool:
        return self != Tiers()

    def of_shard(self, *, is_trained: bool) -> Tier:
        """A trained shard is what the optimizer changes; a frozen one is only what forward computes with."""
        return self.optimizer if is_trained else self.parameters


@dataclass(frozen=True)
class Placement:
    """One state's home: whole on every rank (no axes), or cut over mesh axes.

    >>> Placement((INSIDE,)).is_cut, Placement((INSIDE,)).other_axes
    (True, ('across',))
    """

    axes: tuple[str, ...] = ()

    @property
    def is_cut(self) -> bool:
        return bool(self.axes)

    @property
    def other_axes(self) -> tuple[str, ...]:
        """The axes along which it is repeated."""
        return tuple(axis for axis in AXES if axis not in self.axes)


WHOLE = Placement()
CUT = Placement(AXES)
CUT_INSIDE = Placement((INSIDE,))


@dataclass(frozen=True)
class Row:
    """Placements of parameters, gradients and optimizer states; all behaviour is derived from them.

    `copy` is where a second copy of the parameters is kept between a gather and the next change of them.

    >>> row(2).reduces_to_owner, row(2).refreshes_after_step, row(3).releases_parameters
    (True, True, True)
    """

    name: str
    parameters: Placement
    gradients: Placement
    optimizer: Placement
    cut: Cut = Cut.EVEN
    copy: Placement | None = None

    @property
    def reduces_to_owner(self) -> bool:
        """A rank needs only the gradient of what it updates: reduce-scatter. Otherwise all-reduce."""
        return self.optimizer.is_cut

    @property
    def reduces_across(self) -> bool:
        """Several groups update the same range, so what was reduced inside each is summed across them."""
        return self.optimizer.is_cut and bool(self.optimizer.other_axes)

    @property
    def refreshes_after_step(self) -> bool:
        """Each rank updates its own range of whole parameters, so the others' ranges must be fetched."""
        return self.optimizer.is_cut and not self.parameters.is_cut

    @property
    def releases_parameters(self) -> bool:
        return self.parameters.is_cut

    @property
    def has_owners(self) -> bool:
        """Each parameter is updated by one rank that has all of it."""
        return self.optimizer.is_cut and self.cut is not Cut.EVEN

    @property
    def has_groups(self) -> bool:
        """Ranks in a group share what those of other groups have as well, so somebody must say how large a group is."""
        return self.reduces_across or self.copy is not None


#                name    parameters  gradients   optimizer
_TABLE = {
    "dp": Row("dp", WHOLE, WHOLE, CUT, Cut.FIRST),  # reduced to the first rank, which updates and sends all back
    "0": Row("0", WHOLE, WHOLE, WHOLE),  # DDP: gradients all-reduced as they come
    "1": Row("1", WHOLE, WHOLE, CUT),  # own range reduced once a step, then parameters gathered
    "2": Row("2", WHOLE, CUT, CUT),  # gradients cut as they come; the shard accumulates
    "3": Row("3", CUT, CUT, CUT),  # parameters gathered around their use as well
    "hsdp": Row("hsdp", CUT_INSIDE, CUT_INSIDE, CUT_INSIDE),  # cut inside a group, the same in every group
    "hpz": Row("hpz", CUT, CUT, CUT, copy=CUT_INSIDE),  # gathered once over all, then inside the group
}
ROWS = tuple(_TABLE)
_CUT_BY_PARAMETER = ("1", "2", "3")


def row(stage: int | str, cut: str | None = None) -> Row:
    """The row for a stage given as 0, 1, 2, 3 or its name; `cut` is "even" or "whole", None for the row's own.

    >>> row(3).parameters.is_cut, row(2, "whole").has_owners, row("dp").has_owners
    (True, True, True)
    """
    found = _TABLE.get(str(stage)) if isinstance(stage, (int, str)) and not isinstance(stage, bool) else None
    if found is None:
        raise ValueError(f"stage={stage!r} does not exist; choose one of {', '.join(ROWS)}")
    if cut not in (None, "even", "whole"):
        raise ValueError(f"cut={cut!r} does not exist; use cut='even' or cut='whole'")
    if cut == "whole" and found.name in _CUT_BY_PARAMETER:
        return replace(found, cut=Cut.WHOLE)
    own = "whole" if found.has_owners else "even"
    if cut not in (None, own):
        raise ValueError(
            f"stage={found.name!r} has no cut={cut!r}: leave cut out, or choose one of stages "
            f"{', '.join(_CUT_BY_PARAMETER)}"
        )
    return found
