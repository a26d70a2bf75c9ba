"""Parameters that the first stage of a pipeline and the last one both have, as a tied embedding and head are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofold.access import full_params
from zerofold.engine import Engine
from zerofold.parallel.mesh import PIPELINE
from zerofold.parallel.split import Split, Tied
from zerofold.slab import Slab


class Ties:
    """Keeps both copies alike: they start from the same values and get the sum of both gradients."""

    def __init__(self, split: Split, rank: int, group: dist.ProcessGroup) -> None:
        self._all, self._group = split.tied, group
        self._are_alike = not split.tied
        first, last = split.stages[0].rank, split.stages[-1].rank
        self._is_last = rank == last
        self._peer = dist.get_process_group_ranks(group)[first if self._is_last else last]

    def make_alike(self, model: nn.Module) -> None:
        """Before the first step: the last stage takes the first one's values, which may have come from another init."""
        if self._are_alike:
            return
        self._are_alike = True
        with full_params(model), torch.no_grad():
            for tied in self._all:
                other = self._exchange(tied.parameter.detach())
                if self._is_last and not torch.equal(other, tied.parameter):
                    tied.parameter.copy_(other)

    def set_aside(self, engine: Engine) -> list[Tensor | None]:
        """Local sums of earlier steps: they have been exchanged, so only what this step adds may be."""
        return [slab.gradients.take_local(index) for _, slab, index in self._places(engine)]

    def add(self, engine: Engine, earlier: list[Tensor | None]) -> None:
        """On both ranks the gradient becomes the sum of what the two places of the parameter got."""
        for (tied, slab, index), before in zip(self._places(engine), earlier, strict=True):
            shape, dtype = tied.parameter.shape, slab.dtypes.accumulation
            got = slab.gradients.take_local(index)
            mine = torch.zeros(shape, dtype=dtype, device=engine.device) if got is None else got.to(dtype).view(shape)
            engine.traffic.add("send", tied.name, PIPELINE, mine.numel(), mine.element_size())
            total = mine + self._exchange(mine)  # of two numbers: the same bits in either order
            slab.gradients.put_local(index, total if before is None else total.add_(before.view(shape)))

    def _places(self, engine: Engine) -> list[tuple[Tied, Slab, int]]:
        places = engine.places()
        return [(tied, *places[id(tied.parameter)]) for tied in self._all if tied.parameter.requires_grad]

    def _exchange(self, mine: Tensor) -> Tensor:
        """With the rank that has the other end of the pipeline."""
        sent = mine.contiguous()
        theirs = torch.empty_like(sent)
        both = [dist.P2POp(dist.isend, sent, self._peer, self._group)]
        both.append(dist.P2POp(dist.irecv, theirs, self._peer, self._group))
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return theirs
