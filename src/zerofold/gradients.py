"""A slab's gradients, from autograd's hands to where the optimizer finds them: what all of its kinds can do.

`gradients_whole`      every rank updates everything: `p.grad` is averaged in place
`gradients_on_faces`   each rank updates its shard: local gradients are summed into it and shown on the sharded faces
`gradients_away`       the same, in another memory than the device's

The life of a gradient in one backward, called by `hooks` and `reduction_order`:

before_accumulate → arrived     autograd hands over the gradient of one parameter; several calls of a module: again
launch                          the slab is complete, or the last to be: its reduction sets out
settle                          all ranks have agreed on which parameters have a gradient anywhere: those are shown

Where a backward ends without a reduction (`no_sync`, further micro-batches), `keep_partial` comes in place of the last
two; where it raised, `abandon` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from zerofold.reduce import Reducer


class SlabGradients(ABC):
    arrived_since_reduce: set[int]
    """Indices of parameters."""

    @abstractmethod
    def before_accumulate(self, index: int) -> None:
        """Autograd is about to write the gradient of a parameter to its `.grad`, or to add it there."""

    @abstractmethod
    def arrived(self, index: int) -> None:
        """It has done so."""

    @abstractmethod
    def notice_changes(self) -> None:
        """Drops what the user has cleared since it was shown (`zero_grad`), local sums included, and takes what the
        user has assigned in its place."""

    @abstractmethod
    def launch(self, reducer: Reducer, unit: str, *, across: bool) -> None:
        """Starts to reduce what has arrived; a parameter with nothing counts as zeros. `across`: over all groups."""

    @abstractmethod
    def settle(self, present: Sequence[bool]) -> None:
        """The reduction is through: shows the gradients of those parameters that had one on any rank."""

    @abstractmethod
    def keep_partial(self) -> None:
        """A backward has ended without a reduction: what has arrived waits for a later one."""

    def awaiting_across(self) -> set[int]:
        """Parameters whose gradient is reduced inside the group and not yet across groups."""
        return set()

    @abstractmethod
    def abandon(self) -> None:
        """A backward has raised: what arrived in it, and was not shown yet, is dropped."""

    @abstractmethod
    def take_local(self, index: int) -> Tensor | None:
        """What has arrived of a gradient and is not reduced yet, which is then no longer here."""

    @abstractmethod
    def put_local(self, index: int, gradient: Tensor) -> None:
        """The opposite of `take_local`."""

    @abstractmethod
    def lie_in(self, flat: Tensor) -> None:
        """From now on gradients are in this memory of zeros, from the first backward on."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """All that is held, wherever."""

    @property
    def device_nbytes(self) -> int:
        """Of `nbytes`, what is in the memory of the device."""
        return self.nbytes

    @property
    def local_nbytes(self) -> int:
        """Of `nbytes`, what this rank alone has added up and not yet reduced, with memory that is kept for it."""
        return 0


def can_hold(memory: Tensor, gradient: Tensor) -> bool:
    """Whether the memory has a dtype that represents every number of the gradient exactly."""
    return torch.promote_types(gradient.dtype, memory.dtype) is memory.dtype


def arrived_at(parameter: Tensor) -> Tensor:
    """The gradient that autograd has left there."""
    gradient, shape = parameter.grad, tuple(parameter.shape)
    if gradient is None:
        raise RuntimeError(
            f"a hook has taken away the gradient of a parameter of shape {shape} before it was reduced, as an "
            "optimizer inside backward does: change it in the hook, and let the attached optimizer's step() use it"
        )
    if gradient.is_sparse:
        raise RuntimeError(
            f"a parameter of shape {shape} got a sparse gradient, which cannot be cut into ranges; build the embedding "
            "with sparse=False"
        )
    return gradient
