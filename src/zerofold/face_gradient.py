"""What `parameter.grad` shows where the gradient itself is on the sharded face."""

from __future__ import annotations

import torch
from torch import Tensor

from zerofold.shard_spec import ShardSpec
from zerofold.sharded import ShardedParameter, ShardedTensor


class FaceGradient(ShardedTensor):
    """The gradient of a sharded face, shown on the whole parameter. It looks it up and does not keep it alive."""

    _face: ShardedParameter

    @staticmethod
    def __new__(cls, face: ShardedParameter) -> FaceGradient:
        shape, dtype, device = face.spec.shape, face.dtype, face.device
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._face = face
        return made

    def _original(self) -> ShardedTensor:
        gradient = self._face.grad
        if not isinstance(gradient, ShardedTensor):
            raise RuntimeError(f"the gradient of '{self._face.spec.name}' was cleared by the optimizer's zero_grad")
        return gradient

    @property
    def is_cleared(self) -> bool:  # type: ignore[override]
        return self._face.grad is None

    @property
    def _local(self) -> Tensor:  # type: ignore[override]
        return self._original().raw_local

    @property
    def _spec(self) -> ShardSpec:  # type: ignore[override]
        return self._face.spec

    @property
    def known_norm(self) -> Tensor | None:
        return self._original().known_norm

    @known_norm.setter
    def known_norm(self, value: Tensor | None) -> None:
        self._original().known_norm = value

    @property
    def was_zeroed(self) -> bool:
        return self._original().was_zeroed

    @was_zeroed.setter
    def was_zeroed(self, value: bool) -> None:
        self._original().was_zeroed = value

    @property
    def is_unreduced(self) -> bool:  # type: ignore[override]
        return self._original().is_unreduced

    @property
    def is_used_up(self) -> bool:  # type: ignore[override]
        return self._original().is_used_up

    @property
    def is_being_read(self) -> bool:
        return self._original().is_being_read

    @is_being_read.setter
    def is_being_read(self, value: bool) -> None:
        self._original().is_being_read = value
