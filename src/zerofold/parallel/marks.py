"""What tensor parallelism and pipelines leave on a model, for those who come later: checkpointed blocks, `zf.prepare`.

Who only asks whether a model is spread does not load torch's DTensor and pipelining, which take a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from zerofold.parallel.mesh import Mesh
from zerofold.part import part_of

_ATTRIBUTE = "_zerofold_tensor_ranks"
_STAGES = "_zerofold_pipeline"
_STAGE = "_zerofold_stage"


class TensorSpread(NamedTuple):
    """How a model was spread over a tensor axis."""

    ranks: int
    sequence_ranks: int = 1  # that each have a part of the sequence between the blocks
    loss_ranks: int = 1  # that each have some of the words of the logits

    def leave_on(self, model: nn.Module) -> None:
        setattr(model, _ATTRIBUTE, self)


def was_spread(model: nn.Module) -> bool:
    """Whether `zf.tensor_parallel` was here, or took in what torch's parallelize_module had done."""
    return any(_ATTRIBUTE in vars(module) for module in model.modules())


def tensor_ranks(model: nn.Module) -> int:
    """Over how many ranks the insides of the model's layers are cut; 1 where they are whole."""
    found = (vars(module).get(_ATTRIBUTE) for module in model.modules())
    return max((spread.ranks for spread in found if isinstance(spread, TensorSpread)), default=1)


def sequence_ranks(model: nn.Module) -> int:
    """Over how many ranks the sequence is cut between the model's blocks; 1 where it is whole."""
    return max((spread.sequence_ranks for spread in _spreads(model)), default=1)


def loss_ranks(model: nn.Module) -> int:
    """Over how many ranks its logits are cut; 1 where they are whole."""
    return max((spread.loss_ranks for spread in _spreads(model)), default=1)


def _spreads(model: nn.Module) -> Iterator[TensorSpread]:
    found = (vars(module).get(_ATTRIBUTE) for module in model.modules())
    return (spread for spread in found if isinstance(spread, TensorSpread))


class HoldsStages:
    """Has a model that was cut into stages: `zf.Pipeline`."""

    model: nn.Module
    mesh: Mesh

    def leave_on(self, model: nn.Module) -> None:
        vars(model)[_STAGES] = self


def leave_stage(block: nn.Module, index: int) -> None:
    vars(block)[_STAGE] = index


def stage_of(block: nn.Module) -> int | None:
    """Which stage of a pipeline it belongs to: a rank may have several. None where there is no pipeline."""
    found = vars(block).get(_STAGE)
    return found if isinstance(found, int) else None


def pipeline_ranks(model: nn.Module) -> int:
    """Over how many ranks `zf.pipeline` has cut the model into stages; 1 where it has not."""
    found = (vars(module).get(_STAGES) for module in model.modules())
    return max((holder.mesh.pipeline for holder in found if isinstance(holder, HoldsStages)), default=1)


def is_cut_into_stages(model: nn.Module) -> bool:
    """By `zf.pipeline`, or by hand, which `Part`s of parameters tell."""
    if any(_STAGES in vars(module) for module in model.modules()):
        return True
    return any(part_of(parameter) is not None for parameter in model.parameters()) and not was_spread(model)
