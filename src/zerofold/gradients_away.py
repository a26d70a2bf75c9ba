"""Gradients that wait for the update in another memory than the device's: they go there as each slab is complete.

autograd   [ b3 ][ b2 ][ b1 ]
down             [g3]  [g2]  [g1]        a copy to pinned memory, beside the next unit's backward

On a single rank the gradient of one backward goes as it was made, and may take the place of the 16-bit parameter, which
nobody needs again before the update makes a new one. More backwards add up in the accumulation dtype: the sum comes up,
meets the new gradient on the device, and goes down again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zerofold.gradients_on_faces import FaceGradients, as_gradient
from zerofold.layout import FlatLayout
from zerofold.memory import Done, Transfers, share_storage
from zerofold.precision import Dtypes
from zerofold.reduce import Reducer
from zerofold.sharded import ShardedParameter, ShardedTensor


class AwayGradients(FaceGradients):
    """FaceGradients whose pieces are in `room`, this rank's range in flat memory of another tier."""

    def __init__(
        self,
        parameters: list[Tensor],
        faces: list[ShardedParameter],
        layout: FlatLayout,
        dtypes: Dtypes,
        room: Tensor,
        transfers: Transfers,
        *,
        in_place: bool,
        more_room: Callable[[torch.dtype], Tensor],
    ) -> None:
        super().__init__(parameters, faces, layout, dtypes)
        self._flat = room
        self._transfers, self._more_room = transfers, more_room
        self._is_in_place = in_place  # the room is also that of the 16-bit parameters
        self.spoiled: set[int] = set()  # parameters in whose place there is, or was, a gradient
        self.staying: frozenset[int] = frozenset()  # these do not go: the update needs them on the device
        self.landed = Done()  # what was sent to the room last

    @property
    def room(self) -> Tensor:
        assert self._flat is not None
        return self._flat

    @property
    def is_in_place_of_parameters(self) -> bool:
        """Some gradient is needed where a parameter would be."""
        shown = (self.faces[index].grad for index in self.spoiled if self._is_shown[index])
        return any(isinstance(gradient, ShardedTensor) and not gradient.is_used_up for gradient in shown)

    def finish(self) -> None:
        """Returns when the room holds what was sent to it."""
        self.landed.finish()

    def use_up(self, index: int) -> None:
        """The update takes the gradient, and writes a new parameter in its place where that is its place."""
        gradient = self.faces[index].grad
        if isinstance(gradient, ShardedTensor) and gradient.raw_local.device == self.room.device:
            gradient.is_used_up = True
        self.spoiled.discard(index)

    def launch(self, reducer: Reducer, unit: str, *, across: bool) -> None:
        super().launch(reducer, unit, across=across)
        if self._is_in_place and (reducer.comm.size > 1 or reducer.across is not None):
            self.spoiled.update(range(len(self.parameters)))  # also with zeros, where no rank had a gradient

    def settle(self, present: Sequence[bool]) -> None:
        super().settle(present)
        if self._is_in_place:  # zeros that nobody sees make way for parameters again
            self._holds_value = [
                holds and shown for holds, shown in zip(self._holds_value, self._is_shown, strict=True)
            ]

    def keep_partial(self) -> None:
        waiting = [index for index, local in enumerate(self._local) if local is not None]
        if waiting:  # the host writes zeros: what is being read there must be on its way
            self.faces[0].spec.step.look(self.room)
        super().keep_partial()
        if self._is_in_place:
            self.spoiled.update(waiting)  # zeros, to which the last backward adds

    @property
    def nbytes(self) -> int:
        return self.room.nbytes + self.device_nbytes

    @property
    def device_nbytes(self) -> int:
        """What waits to go to the room, and what stays for an update that needs it here."""
        shown = [face.grad.raw_local for face in self.faces if isinstance(face.grad, ShardedTensor)]
        return self.local_nbytes + sum(each.nbytes for each in shown if not share_storage(each, self.room))

    def _take_given(self, index: int, given: Tensor) -> None:
        self.faces[0].spec.step.look(self.room)  # the host writes: what is being read there must be on its way
        super()._take_given(index, given)
        if self._is_in_place:
            self.spoiled.add(index)

    def _notice_changes(self, index: int) -> None:
        shown = self.faces[index].grad
        if isinstance(shown, ShardedTensor) and shown.is_used_up and shown.was_zeroed:
            # Wanted as zeros, and its memory was not its own then. The update that took it has ended since.
            shown.is_used_up, shown.known_norm = False, None
            self._piece(index).zero_()
            if self._is_in_place:
                self.spoiled.add(index)
        super()._notice_changes(index)

    @torch.no_grad()
    def _adopt(self, local: list[Tensor | None], scale: float) -> None:
        stays = [self._stays(index) for index in range(len(local))]
        staying = [g if s else None for g, s in zip(local, stays, strict=True)]
        super()._adopt(staying, scale)
        self._take_norms([index for index, gradient in enumerate(staying) if gradient is not None])
        arrived = [(i, g) for i, g in enumerate(local) if g is not None and not stays[i]]
        if not arrived:
            return
        is_sum = any(self._has_earlier(i) or g.dtype.itemsize > self.room.dtype.itemsize for i, g in arrived)
        if is_sum and self.room.dtype is not self.dtypes.accumulation:
            self._widen()
        with self._transfers.down():
            sent = []
            for index, gradient in arrived:
                self._transfers.is_used(gradient)
                gradient = self._unscaled(gradient, scale)
                if self._has_earlier(index):
                    earlier = self._piece(index).to(gradient.device, non_blocking=True)
                    gradient = earlier.add_(gradient) if earlier.device != self.room.device else earlier + gradient
                sent.append(gradient)
            for (index, _), gradient, norm in zip(arrived, sent, _norms(sent), strict=True):
                self._piece(index).copy_(gradient, non_blocking=True)
                self._show(index)
                shown = self.faces[index].grad
                assert isinstance(shown, ShardedTensor)
                shown.known_norm = norm
                if self._is_in_place:
                    self.spoiled.add(index)
            self.landed = self._transfers.done()
        self.faces[0].spec.step.is_under_way = True

    def _take_norms(self, staying: Sequence[int]) -> None:
        """Under backward, so that the step has less to do before it knows that of all."""
        shown = [gradient for index in staying if isinstance(gradient := self.faces[index].grad, ShardedTensor)]
        for dtype in dict.fromkeys(gradient.raw_local.dtype for gradient in shown):
            some = [gradient for gradient in shown if gradient.raw_local.dtype is dtype]
            for gradient, norm in zip(some, _norms([each.raw_local for each in some]), strict=True):
                gradient.known_norm = norm

    def _stays(self, index: int) -> bool:
        """A gradient is added to where the earlier one is; a first one goes where the next update wants it."""
        shown = self.faces[index].grad
        if not isinstance(shown, ShardedTensor):
            return index in self.staying
        return not share_storage(shown.raw_local, self.room)

    def _has_earlier(self, index: int) -> bool:
        shown = self.faces[index].grad
        if not isinstance(shown, ShardedTensor):
            return False
        if shown.is_used_up:
            raise RuntimeError(
                f"the gradient of '{self.faces[index].spec.name}' was not cleared after the step, and cannot be added "
                "to: its memory was used for the new parameter. Call optimizer.zero_grad() after every step"
            )
        return True

    def _widen(self) -> None:
        """Several micro-batches make a step, and there is room for the 16-bit gradient of one."""
        warnings.warn(
            "gradients of several micro-batches add up in fp32, and nobody has planned host memory for that: pass "
            "accumulate= (the number of micro-batches in a step) to zf.prepare",
            stacklevel=2,
        )
        self.finish()
        narrow = self.room
        self._flat = self._more_room(self.dtypes.accumulation).copy_(narrow)
        self._is_in_place = False
        for index, face in enumerate(self.faces):
            gradient = face.grad  # one that stays on the device was never in the room
            if isinstance(gradient, ShardedTensor) and share_storage(gradient.raw_local, narrow):
                face.grad = as_gradient(face, self._piece(index))


def _norms(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Of tensors of one dtype; those of 16 bits are summed up in 32."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch._foreach_norm(tensors, 2.0, dtype=wide)
