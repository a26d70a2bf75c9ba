"""What a unit's states take in each memory: the one source of these numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zerofold.placement import Tier, Tiers

OPTIMIZER, GRADIENTS, PARAMETERS = STATES = ("optimizer", "gradients", "parameters")

ByState = dict[str, int]
ByTier = dict[Tier, ByState]


@dataclass(frozen=True)
class UnitSize:
    """One unit on this rank. `trained` and `frozen` are elements it keeps, the bytes are per element, but for
    `gathered_bytes`: the whole unit in the compute dtype, which stays on the device where `whole_parameters`; and
    `copy_bytes`: this rank's part of its group's copy, which stays there too."""

    name: str
    trained: int
    frozen: int = 0
    master_bytes: int = 4
    moments_bytes: int = 8
    gradient_bytes: int = 2
    compute_bytes: int = 2
    has_master: bool = True
    """The compute dtype is another one than that of the shard."""
    gathered_bytes: int = 0
    copy_bytes: int = 0
    whole_parameters: bool = False

    @property
    def kept(self) -> int:
        return self.trained + self.frozen


def bytes_of(unit: UnitSize, tiers: Tiers) -> ByTier:
    """Bytes by tier and state.

    ```
    optimizer on the device     [master][moments][gradient]            16-bit parameters are made when gathered
    optimizer on the host       [master][moments]   [slot]             the gradient comes down into the slot; the update
                                                                       leaves the new 16-bit parameter there
      parameters on the device  ... and [16-bit] on the device         copied up from the slot
      parameters on the host    ... nothing more                       the slot is where they live
    ```

    >>> unit = UnitSize("block", 1000)
    >>> bytes_of(unit, Tiers(Tier.HOST, Tier.HOST, Tier.HOST))[Tier.HOST]
    {'optimizer': 12000, 'gradients': 0, 'parameters': 2000}
    """
    found: ByTier = {tier: dict.fromkeys(STATES, 0) for tier in Tier}
    trained = unit.trained
    shard_state, shard_bytes = OPTIMIZER, trained * unit.master_bytes
    copy = 0
    gradient = trained * unit.gradient_bytes
    if tiers.optimizer is not Tier.DEVICE and not unit.whole_parameters:
        copy = trained * unit.compute_bytes
        if tiers.parameters is tiers.gradients is Tier.HOST and copy != gradient:
            copy = 0  # no slot to share: parameters are made from the masters, wherever they are needed
    if not unit.has_master and (tiers.optimizer is tiers.parameters):
        # The shard itself is what forward computes with. Where parameters are whole it is a range of them.
        shard_state, copy = PARAMETERS, 0
        shard_bytes *= not unit.whole_parameters
    found[tiers.optimizer][shard_state] += shard_bytes
    found[tiers.optimizer][OPTIMIZER] += trained * unit.moments_bytes
    found[tiers.parameters][PARAMETERS] += copy
    shares_slot = tiers.gradients is tiers.parameters is Tier.HOST and gradient == copy  # in a file each has its own
    if not shares_slot:
        found[tiers.gradients][GRADIENTS] += gradient
    found[Tier.DEVICE][PARAMETERS] += unit.copy_bytes
    if unit.whole_parameters:
        found[Tier.DEVICE][PARAMETERS] += unit.gathered_bytes
    else:
        found[tiers.parameters][PARAMETERS] += unit.frozen * unit.compute_bytes
    return found


def summed(units: Iterable[UnitSize], tiers: Mapping[str, Tiers]) -> ByTier:
    """Bytes of all units by tier and state; `tiers` by unit name."""
    found: ByTier = {tier: dict.fromkeys(STATES, 0) for tier in Tier}
    for unit in units:
        for tier, states in bytes_of(unit, tiers[unit.name]).items():
            for state, nbytes in states.items():
                found[tier][state] += nbytes
    return found
