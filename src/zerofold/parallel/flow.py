"""Whether one tensor alone goes from block to block: all that a pipeline sends from stage to stage.

On later stages stand-ins give zeros for what runs before the blocks, so a model that uses more of it than the stream
(the embedding again in every block, or after the last one) would train on zeros, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zerofold.nested import map_tensors, tensors_in
from zerofold.parallel.anatomy import Anatomy, Example, fake_arguments, run_without_blocks


class _Refused(ValueError):
    """What the model must not do, in contrast to errors of its own forward."""


def check_flow(model: nn.Module, anatomy: Anatomy, example: Example | None) -> None:
    """Runs the model once more without its blocks and without memory, and follows what depends on what by autograd.

    What comes from before the blocks is marked as requiring a gradient, and so is what blocks give, but for the last.
    """
    flow = _Flow(last=list(anatomy.blocks)[-1])
    length, marking = anatomy.length_of_output, _marking(anatomy.before.values())
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            args, kwargs = fake_arguments(model, example)
            output = run_without_blocks(model, anatomy.blocks, flow.pass_on, length, args, kwargs, watching=marking)
        flow.check_output(output)
    except _Refused as refused:
        raise ValueError(str(refused)) from None
    except Exception:
        return  # after the blocks, where the model misses something: who runs when is known all the same


@contextmanager
def _marking(modules: Iterable[nn.Module]) -> Iterator[None]:
    handles = [module.register_forward_hook(_mark_output) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Flow:
    def __init__(self, last: str) -> None:
        self.last = last
        self.sent: Tensor | None = None  # by the block before
        self.version = 0  # of that: what changes it in place leaves another

    def pass_on(self, name: str, stream: Tensor, others: list[Tensor]) -> Tensor:
        if self.sent is not None and not self._is_what_was_sent(stream):
            raise _Refused(
                f"pipeline: '{name}' is not given what the block before it returns, but something that the model makes "
                "of it in between: let the blocks do that (also a residual, x = x + block(x))"
            )
        besides = next((tensor for tensor in others if tensor.requires_grad), None)
        if besides is not None:
            raise _Refused(
                f"pipeline: '{name}' is given a tensor of shape {tuple(besides.shape)} beside the stream of "
                f"{tuple(stream.shape)}, which modules with parameters make before the blocks: other stages do not "
                "have them; let every block compute it"
            )
        self.sent = stream.detach().clone() if name == self.last else _marked(stream)
        self.version = self.sent._version
        return self.sent

    def _is_what_was_sent(self, stream: Tensor) -> bool:
        sent = self.sent
        assert sent is not None
        is_same = stream.untyped_storage()._cdata == sent.untyped_storage()._cdata and stream.shape == sent.shape
        return is_same and sent._version == self.version

    def check_output(self, output: Any) -> None:
        """The first tensor is the loss or the logits; what else a model returns may stay behind on other stages."""
        first = next(tensors_in(output), None)
        if self.sent is None or self.sent.requires_grad:  # reentrant checkpointing marks everything
            return
        if first is not None and first.requires_grad:
            raise _Refused(
                "pipeline: what the model returns depends on more than the last block's output: on an earlier block, "
                "or on what runs before the blocks, which the last stage does not have; let it pass through the blocks"
            )


def _marked(tensor: Tensor) -> Tensor:
    """Not a leaf, so that the model may change it in place."""
    return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor


def _mark_output(module: nn.Module, args: Any, output: Any) -> Any:
    return map_tensors(_marked, output)
