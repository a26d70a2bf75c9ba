"""What a slab is made of: parameters with their places, and what all slabs of a model share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from zerofold.groups import Groups
from zerofold.layout import FlatLayout
from zerofold.memory import StorageCache, TierMemory, Transfers
from zerofold.part import Part, part_of
from zerofold.placement import Row, Tiers
from zerofold.precision import Dtypes, Precision
from zerofold.shard_spec import StepScope
from zerofold.sharded import ShardedParameter


class Source(Protocol):
    """The values of one parameter where they are stored, to be read in flat ranges."""

    def read(self, start: int, stop: int) -> Tensor: ...


@dataclass
class Entry:
    """One parameter with every place (module, attribute) that holds it."""

    name: str
    parameter: nn.Parameter
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    owner: int = 0  # where the row gives parameters owners
    dtypes: Dtypes | None = None
    face: ShardedParameter | None = None  # what stands for it outside its unit and in optimizers, once it is cut
    source: Source | None = None  # where its first values come from, if not from the model

    @property
    def part(self) -> Part | None:
        """Of what it is a part, where a model is spread over a tensor or pipeline axis."""
        return part_of(self.parameter)

    @property
    def wants_gradient(self) -> bool:
        """By what the model shows of it now, which is what a user freezes and thaws."""
        shown = [module._parameters.get(attribute) for module, attribute in self.sites]
        return any(p is not None and p.requires_grad for p in shown)


class EngineLink:
    """Leads from a parameter to the engine that trains it, and does not keep it alive. It pickles as nothing."""

    def __init__(self, engine: object) -> None:
        self.find = ref(engine)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()


class Home(NamedTuple):
    """What all slabs of a model share."""

    row: Row
    groups: Groups
    device: torch.device
    cache: StorageCache
    step: StepScope
    precision: Precision
    memory: TierMemory
    transfers: Transfers
    tiers: Mapping[str, Tiers]  # by unit
    adds_up: bool = False  # a step is made of several backwards, whose gradients are added up
    engine: EngineLink | None = None


class Waitable(Protocol):
    @property
    def waits_for(self) -> str:
        """A category of `timing`."""

    def wait(self) -> None:
        """Returns when the current stream may use what was set going."""


class Update(Waitable, Protocol):
    """New values for a slab that are still being computed, elsewhere."""

    @property
    def is_near(self) -> bool:
        """Whether `wait` would return without keeping the host."""


def dtypes_of(entry: Entry) -> Dtypes:
    assert entry.dtypes is not None, f"no dtypes were chosen for '{entry.name}'"
    return entry.dtypes


def lay_out(entries: list[Entry], row: Row, world: int) -> FlatLayout:
    numels = [entry.parameter.numel() for entry in entries]
    itemsize = dtypes_of(entries[0]).smallest_itemsize
    if row.has_owners:
        return FlatLayout.by_owner(numels, [entry.owner for entry in entries], world=world, itemsize=itemsize)
    return FlatLayout.even(numels, world=world if row.optimizer.is_cut else 1, itemsize=itemsize)
