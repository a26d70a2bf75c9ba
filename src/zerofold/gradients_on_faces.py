"""Gradients where each rank updates its shard: the mean of this rank's range, shown on the sharded faces.

p.grad, from autograd
   │  arrived
_local[i]            this rank's sum of what is not reduced yet, one flat tensor for each parameter
   │  launch         the mean over ranks, of this rank's range
_flat                one piece for each parameter; a rank alone needs none: there the local gradient is the mean
   │  settle
faces[i].grad        the piece, which the whole parameter's `p.grad` shows as well (`FaceGradient`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from zerofold.face_gradient import FaceGradient
from zerofold.gradients import SlabGradients, arrived_at, can_hold
from zerofold.layout import FlatLayout
from zerofold.memory import share_storage
from zerofold.precision import Dtypes
from zerofold.reduce import Reducer, Reduction
from zerofold.sharded import ShardedParameter, ShardedTensor


def as_gradient(face: ShardedParameter, piece: Tensor) -> ShardedTensor:
    gradient = ShardedTensor(face.spec.shaped(piece), face.spec)
    gradient.is_original = True
    return gradient


class FaceGradients(SlabGradients):
    """Each rank ends with the mean gradient of what it updates, shown as `.grad` of the sharded faces.

    Local gradients are taken from `p.grad` as they arrive and dropped once reduced, so nothing counts twice. The
    whole parameter's `p.grad` shows the face's gradient: so `model.zero_grad()` is noticed while the module holds
    whole parameters, and torch's own clipping says what to call instead of finding nothing.

    What is shown is the true gradient: a loss scale is taken out on the way into the accumulators.
    """

    def __init__(
        self, parameters: list[Tensor], faces: list[ShardedParameter], layout: FlatLayout, dtypes: Dtypes
    ) -> None:
        self.parameters, self.faces, self.layout, self.dtypes = parameters, faces, layout, dtypes
        self._place = faces[0].spec.comm.rank if layout.world > 1 else 0
        for tensor in () if dtypes.is_plain else (*parameters, *faces):
            tensor.grad_dtype = None  # a gradient may have another dtype than what it belongs to
        self.arrived_since_reduce: set[int] = set()
        self._awaits_across = False  # what is shown is reduced inside the group, and not yet across groups
        self._local: list[Tensor | None] = [None] * len(parameters)
        self._is_shown = [False] * len(parameters)  # as faces[i].grad, which alone keeps it: clearing frees it
        self._holds_value = [False] * len(parameters)  # the shard's piece holds a gradient: add, do not overwrite
        self._taken: set[int] = set()  # p.grad is None because we took it, not because the user cleared it
        self._on_parameters = [FaceGradient(face) for face in faces]
        self._flat: Tensor | None = None
        self._is_reserved = False  # `_flat` is a part of a larger block, and is used on a rank alone too
        self._sums: Tensor | None = None  # likewise, for what is local
        self._starts: list[int] = []  # of each parameter's sum
        self._are_sums_sent = False  # what is under way may still be read from there
        self.on_mean: Callable[[], None] | None = None  # told when a rank alone has the gradients of a backward

    def lie_in(self, flat: Tensor) -> None:
        """From now on pieces are in this memory of zeros, those of a rank alone too."""
        self._flat, self._is_reserved = flat, True

    def sum_in(self, sums: Tensor) -> None:
        """From now on what waits for a reduction is in this memory, a place for each parameter."""
        self._sums = sums
        self._starts = [0, *accumulate(self.layout.numels)]

    def before_accumulate(self, index: int) -> None:
        self._notice_changes(index)
        # With nothing to add to, autograd hands over the fresh tensor itself instead of copying it.
        self.parameters[index].grad = None
        self._taken.add(index)

    def arrived(self, index: int) -> None:
        gradient = arrived_at(self.parameters[index])
        self.parameters[index].grad = None
        earlier = self._local[index]
        flat = gradient.detach().reshape(-1)
        if earlier is None:
            self._local[index] = self._placed(index, flat)
        else:
            self._local[index] = earlier.to(self.dtypes.accumulation).add_(flat)
        self.arrived_since_reduce.add(index)

    def notice_changes(self) -> None:
        for index in range(len(self.parameters)):
            self._notice_changes(index)

    def launch(self, reducer: Reducer, unit: str, *, across: bool) -> None:
        self.arrived_since_reduce.clear()
        self._awaits_across = not across and reducer.across is not None
        local, self._local = self._local, [None] * len(self.parameters)
        if reducer.comm.size == 1 and reducer.across is None:
            self._adopt(local, 1 / reducer.loss_scale)
            if self.on_mean is not None:
                self.on_mean()
            return
        self._are_sums_sent = True
        adds, wire = tuple(self._holds_value), self.dtypes.reduction
        reducer.start(Reduction(unit, local, self.layout, self._storage(), adds, across, wire))
        # Zeros where no rank had one. A second reduction in the same backward must add to this one.
        self._holds_value = [True] * len(self.parameters)

    def settle(self, present: Sequence[bool]) -> None:
        self._are_sums_sent = False
        for index, is_present in enumerate(present):
            if is_present and not (self._flat is None and self._is_shown[index]):  # adopted ones are shown already
                self._show(index, unreduced=self._awaits_across)

    def awaiting_across(self) -> set[int]:
        return {i for i, is_shown in enumerate(self._is_shown) if is_shown} if self._awaits_across else set()

    def keep_partial(self) -> None:
        """Backward ended without a reduction: show that there is a gradient, so that clearing it is noticed."""
        for index, local in enumerate(self._local):
            if local is not None:
                if not (self._holds_value[index] or self._is_shown[index]):  # a rank alone shows what it adopted
                    self._piece(index).zero_()
                    self._holds_value[index] = True
                self._show(index, unreduced=True)

    def abandon(self) -> None:
        self._are_sums_sent = False
        for index, is_shown in enumerate(self._is_shown):
            if not is_shown:
                self._local[index] = None
                self._holds_value[index] = False
                self.arrived_since_reduce.discard(index)

    def take_local(self, index: int) -> Tensor | None:
        self._notice_changes(index)
        gradient, self._local[index] = self._local[index], None
        self.arrived_since_reduce.discard(index)
        if gradient is not None and self._is_among_sums(gradient):  # the next one to arrive is written there
            return gradient.clone()
        return gradient

    def put_local(self, index: int, gradient: Tensor) -> None:
        self._local[index] = gradient.reshape(-1)
        self.arrived_since_reduce.add(index)

    def _placed(self, index: int, flat: Tensor) -> Tensor:
        """In the memory for sums, if there is such that holds it exactly; else it stays where autograd made it."""
        sums = self._sums
        if sums is None or self._are_sums_sent or not can_hold(sums, flat):
            return flat
        return sums[self._starts[index] : self._starts[index + 1]].copy_(flat)

    def _is_among_sums(self, tensor: Tensor) -> bool:
        sums = self._sums
        return sums is not None and share_storage(tensor, sums)

    def _notice_changes(self, index: int) -> None:
        given = self._given(index)
        if given is not None:
            self._take_given(index, given)
        if not self._is_shown[index]:
            return
        shown, on_parameter = self.faces[index].grad, self.parameters[index].grad
        if isinstance(shown, ShardedTensor) and shown.was_zeroed:
            # Cleared, but wanted as zeros: the piece stays, what was not yet reduced goes.
            shown.was_zeroed = shown.is_unreduced = False
            self._local[index] = None
            self.arrived_since_reduce.discard(index)
        if shown is None or (on_parameter is None and index not in self._taken):
            self._local[index] = None
            self._holds_value[index] = self._is_shown[index] = False
            self.faces[index].grad = None
            self.arrived_since_reduce.discard(index)
            self._awaits_across = self._awaits_across and any(self._is_shown)

    def _given(self, index: int) -> Tensor | None:
        """What somebody has assigned to `.grad`, of the parameter or of the face, in the place of what was shown."""
        on_parameter, shown = self.parameters[index].grad, self.faces[index].grad
        if on_parameter is not None and on_parameter is not self._on_parameters[index]:
            return on_parameter
        is_original = shown is None or (isinstance(shown, ShardedTensor) and shown.is_original)
        return None if is_original else shown

    @torch.no_grad()
    def _take_given(self, index: int, given: Tensor) -> None:
        face = self.faces[index]
        piece = (given.local if isinstance(given, ShardedTensor) else face.spec.cut(given)).reshape(-1)
        self._local[index] = None
        self.arrived_since_reduce.discard(index)
        face.grad = None
        if self._flat is None and self.layout.world == 1:
            self._show(index, adopted=piece)
            return
        self._piece(index).copy_(piece)
        self._holds_value[index] = True
        self._show(index)

    def _show(self, index: int, adopted: Tensor | None = None, *, unreduced: bool = False) -> None:
        face = self.faces[index]
        if face.grad is None:
            piece = self._piece(index) if adopted is None else adopted
            face.grad = as_gradient(face, piece)
        assert isinstance(face.grad, ShardedTensor)
        face.grad.is_unreduced = unreduced
        self._is_shown[index] = True
        self._taken.discard(index)
        self.parameters[index].grad = self._on_parameters[index]

    def _adopt(self, local: list[Tensor | None], scale: float) -> None:
        """Alone, the local gradient is the mean and becomes the piece itself: no copy, and no wider than it came. Into
        memory that is reserved for it, it is copied.
        """
        for index, gradient in enumerate(local):
            if gradient is None:
                continue
            gradient = self._unscaled(gradient, scale)
            shown = self.faces[index].grad
            if not isinstance(shown, ShardedTensor):
                if self._is_reserved and can_hold(self._piece(index), gradient):  # a sum may be wider than one gradient
                    gradient = self._piece(index).copy_(gradient)
                    self._holds_value[index] = True
                self._show(index, adopted=gradient)
                continue
            earlier = shown.raw_local
            if earlier.dtype is self.dtypes.accumulation:
                earlier.add_(gradient.view_as(earlier))
                shown.known_norm = None
                self._show(index)
            else:
                self.faces[index].grad = None
                self._show(index, adopted=earlier.reshape(-1).to(self.dtypes.accumulation).add_(gradient))

    def _unscaled(self, gradient: Tensor, scale: float) -> Tensor:
        """Without its loss scale a gradient needs more range than fp16 has."""
        if gradient.dtype is torch.float16 or scale != 1.0:
            return gradient.to(self.dtypes.accumulation).mul_(scale)
        return gradient

    def _piece(self, index: int) -> Tensor:
        piece = self.layout.pieces(self._place)[index]
        return self._storage()[piece.shard_start : piece.shard_stop]

    def _storage(self) -> Tensor:
        if self._flat is None:
            size = self.layout.shard_size(self._place)
            self._flat = torch.zeros(size, dtype=self.dtypes.accumulation, device=self.faces[0].device)
        return self._flat

    @property
    def nbytes(self) -> int:
        if self._flat is not None:
            return self._flat.nbytes + self.local_nbytes
        shown = [face.grad for face in self.faces]
        return self.local_nbytes + sum(grad.raw_local.nbytes for grad in shown if isinstance(grad, ShardedTensor))

    @property
    def local_nbytes(self) -> int:
        waiting = [gradient for gradient in self._local if gradient is not None]
        local = sum(gradient.nbytes for gradient in waiting if not self._is_among_sums(gradient))
        return local + (0 if self._sums is None else self._sums.nbytes)
