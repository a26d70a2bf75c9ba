"""Where the three states of a unit live. A ZeRO stage is a row of the table at the end, never a branch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """One state's home: whole on every rank (no axes), or cut into even ranges over mesh axes.

    >>> Placement(("data",)).is_cut
    True
    """

    axes: tuple[str, ...] = ()

    @property
    def is_cut(self) -> bool:
        return bool(self.axes)


WHOLE = Placement()
CUT = Placement(("data",))


@dataclass(frozen=True)
class Row:
    """Placements of parameters, gradients and optimizer states; all behaviour is derived from them.

    >>> row(2).reduces_to_owner, row(2).refreshes_after_step, row(3).releases_parameters
    (True, True, True)
    """

    name: str
    parameters: Placement
    gradients: Placement
    optimizer: Placement

    @property
    def reduces_to_owner(self) -> bool:
        """A rank needs only the gradient of what it updates: reduce-scatter. Otherwise all-reduce."""
        return self.optimizer.is_cut

    @property
    def refreshes_after_step(self) -> bool:
        """Each rank updates its own range of whole parameters, so the others' ranges must be fetched."""
        return self.optimizer.is_cut and not self.parameters.is_cut

    @property
    def releases_parameters(self) -> bool:
        return self.parameters.is_cut


#              name  parameters gradients optimizer
_TABLE = {
    "0": Row("0", WHOLE, WHOLE, WHOLE),  # DDP: gradients all-reduced as they come
    "1": Row("1", WHOLE, WHOLE, CUT),  # own range reduced once a step, then parameters gathered
    "2": Row("2", WHOLE, CUT, CUT),  # gradients cut as they come; the shard accumulates
    "3": Row("3", CUT, CUT, CUT),  # parameters gathered around their use as well
}


def row(stage: int | str) -> Row:
    """The row for a stage given as 0, 1, 2, 3 or its name.

    >>> row(3).parameters.is_cut
    True
    """
    found = _TABLE.get(str(stage)) if isinstance(stage, (int, str)) and not isinstance(stage, bool) else None
    if found is None:
        raise ValueError(f"stage={stage!r} does not exist; choose one of {', '.join(_TABLE)}")
    return found
