"""How much of a model's forward waits for backward, for the ledger: in all of its stores of one kind together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from zerofold.activation.store import CheckpointStore
from zerofold.placement import Tier


class Held:
    """Bytes by tier, now and at most. Stores are not kept alive by it; what they held at most stays known.

    >>> import torch, zerofold as zf
    >>> held, store, x = Held(), zf.CheckpointStore("host"), torch.ones(2, 2, requires_grad=True)
    >>> held.add(store)
    >>> zf.checkpoint(torch.exp, x, store=store).sum().backward()
    >>> held.nbytes["host"], held.peak_nbytes["host"]
    (0, 4096)
    """

    def __init__(self) -> None:
        self._stores: weakref.WeakSet[CheckpointStore] = weakref.WeakSet()
        self.peak_nbytes = _summed([])
        """Of all stores at one moment, for each tier its own."""

    def add(self, store: CheckpointStore) -> None:
        self._stores.add(store)
        store.on_growth = self._note

    @property
    def nbytes(self) -> dict[str, int]:
        return _summed(store.nbytes for store in self._stores)

    def _note(self, grown: CheckpointStore, now: Mapping[str, int]) -> None:
        """Two stores may hold something at once: a backward may come after the `with` of its forward."""
        everything = _summed([now, *(store.nbytes for store in self._stores if store is not grown)])
        self.peak_nbytes = {tier: max(most, everything[tier]) for tier, most in self.peak_nbytes.items()}

    def __reduce__(self) -> tuple[type[Held], tuple[()]]:
        return Held, ()  # a copy of the model has kept nothing yet


def _summed(books: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found = {tier.value: 0 for tier in Tier}
    for book in books:
        for tier, nbytes in book.items():
            found[tier] += nbytes
    return found
