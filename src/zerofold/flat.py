"""Parameters of one unit, end to end in one flat space, which the module shows views of.

storage   | p0 | p1     | p2 |   in the dtype forward computes in; its memory may come and go
masters   | p0 | p1     | p2 |   in the dtype the optimizer changes, whole for a while, and then shown in its place
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zerofold.cutting import regain
from zerofold.entry import Entry, dtypes_of
from zerofold.layout import FlatLayout
from zerofold.memory import FlatStorage, StorageCache


class FlatParameters:
    """The parameters of a slab, made views of one storage. What of it a rank keeps is the business of `slab`."""

    def __init__(self, entries: list[Entry], layout: FlatLayout, device: torch.device, cache: StorageCache) -> None:
        self.entries, self.layout, self._device = entries, layout, device
        for entry in entries:
            regain(entry.parameter, values=entry.source is None)
        self.parameters: list[Tensor] = [entry.parameter for entry in entries]
        self.dtypes = dtypes_of(entries[0])
        self.requires_grad = entries[0].parameter.requires_grad
        self.storage = FlatStorage(layout.size, self.dtypes.compute, device, cache)
        self._storage_id = self.storage.tensor.untyped_storage()._cdata
        self._views = [self._view_of(self.storage.tensor, index) for index in range(len(entries))]  # outlive its memory
        self._masters: Tensor | None = None  # whole, while they are shown in place of the storage

    def make_zeros(self) -> None:
        """For the values, in the dtype that the optimizer changes."""
        if self.dtypes.has_master:
            self.storage.free()
            self._masters = torch.empty(self.layout.size, dtype=self.dtypes.master, device=self._device)
        self.values.zero_()

    def move_in(self, *, with_values: bool) -> None:
        """The module's parameters are views from now on."""
        for index, parameter in enumerate(self.parameters):
            if parameter.is_meta:
                # The same object gets memory, so whoever holds it (an optimizer) keeps holding it. `.data` has its own
                # version counter: a gather into the storage is not a change of the parameter.
                real = nn.Parameter(self.view(index).data, requires_grad=parameter.requires_grad)
                vars(real).update(vars(parameter))
                torch.utils.swap_tensors(parameter, real)
            else:
                if with_values:
                    self.view(index).copy_(parameter.detach())
                parameter.data = self.view(index)
        self.note_versions()

    @property
    def values(self) -> Tensor:
        """What the whole parameters are views of."""
        return self.storage.tensor if self._masters is None else self._masters

    def view(self, index: int) -> Tensor:
        """A whole parameter, as a view of the storage or of the masters that are shown."""
        return self._views[index] if self._masters is None else self._view_of(self._masters, index)

    def _view_of(self, flat: Tensor, index: int) -> Tensor:
        start = self.layout.offsets[index]
        return flat[start : start + self.layout.numels[index]].view(self.parameters[index].shape)

    def holds(self, parameter: Tensor) -> bool:
        home = self._storage_id if self._masters is None else self._masters.untyped_storage()._cdata
        return parameter.untyped_storage()._cdata == home

    def kept_view(self, index: int) -> Tensor:
        """A parameter that lives on between uses, whatever the module shows of it now."""
        return self._views[index]

    def show_masters(self) -> None:
        if self._masters is None:
            self._masters = torch.zeros(self.layout.size, dtype=self.dtypes.master, device=self._device)
            self._bind()

    def hide_masters(self) -> None:
        """The parameters show the storage again, whatever it holds."""
        if self._masters is not None:
            self._masters = None
            self._bind()

    @property
    def shows_masters(self) -> bool:
        return self._masters is not None

    def _bind(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # past the guard: this moves no data
            for index, parameter in enumerate(self.parameters):
                parameter.data = self.view(index)
        self.note_versions()

    def note_versions(self) -> None:
        """What the parameters are now is what they should be."""
        self._versions = [parameter._version for parameter in self.parameters]
