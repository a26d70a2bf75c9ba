"""What tensor parallelism leaves on a model, for those who come later: pipelines, checkpointed blocks, `zf.prepare`."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

_ATTRIBUTE = "_zerofold_tensor_ranks"


class TensorSpread(NamedTuple):
    """How a model was spread over a tensor axis."""

    ranks: int
    sequence_ranks: int = 1  # that each have a part of the sequence between the blocks

    def leave_on(self, model: nn.Module) -> None:
        setattr(model, _ATTRIBUTE, self)


def was_spread(model: nn.Module) -> bool:
    """Whether `zf.tensor_parallel` was here, or took in what torch's parallelize_module had done."""
    return any(_ATTRIBUTE in vars(module) for module in model.modules())


def sequence_ranks(model: nn.Module) -> int:
    """Over how many ranks the sequence is cut between the model's blocks; 1 where it is whole."""
    found = (vars(module).get(_ATTRIBUTE) for module in model.modules())
    return max((spread.sequence_ranks for spread in found if isinstance(spread, TensorSpread)), default=1)
