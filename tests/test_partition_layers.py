"""P_a of ZeRO-R on a GPT that `zf.tensor_parallel` has shared out: what is kept, what is sent, the same gradients."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zerofold as zf
from zerofold.train.gpt import GPT, Block, GPTConfig

LAYERS, WIDTH, SEQUENCE, BATCH, WORDS = 6, 32, 16, 4, 64
WHOLE = BATCH * SEQUENCE * WIDTH * 4  # bytes of a block's input
FUNCTIONAL = torch.ops._c10d_functional


class TensorTraffic(TorchDispatchMode):
    """Bytes that a rank sends for the layers that are cut, as rings do it: DTensor's own collectives, and no others."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.share, self.nbytes, self.calls = (ranks - 1) / ranks, 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = {
            FUNCTIONAL.all_reduce.default: lambda: 2 * args[0].nbytes,
            FUNCTIONAL.all_gather_into_tensor.default: lambda: made.nbytes,
            FUNCTIONAL.reduce_scatter_tensor.default: lambda: args[0].nbytes,
        }
        if func in sizes:
            self.nbytes += self.share * sizes[func]()
            self.calls += 1
        elif func.namespace == FUNCTIONAL.name and any(word in str(func) for word in ("all_", "reduce", "broadcast")):
            raise AssertionError(f"{func} is not counted")
        return made


class Step(NamedTuple):
    kept: dict[str, int]  # bytes after forward
    peak: int  # of checkpoints on the device
    sent: int  # to rebuild inputs
    tensor_sent: float  # by the layers themselves
    calls: int
    gradients: list[Tensor]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    data = torch.randint(0, WORDS, (BATCH, SEQUENCE + 1), generator=generator)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def second_step(tensor: int, *, is_cut: bool, wishes: dict[str, bool] | None = None, **how: Any) -> Step:
    """Of a GPT at stage 3; in the first, inputs are compared as well."""
    torch.set_num_threads(1)
    mesh = zf.mesh(tensor=tensor, device="cpu")
    torch.manual_seed(3)
    model = GPT(GPTConfig(layers=LAYERS, hidden=WIDTH, heads=4, seq=SEQUENCE, vocab=WORDS))
    zf.tensor_parallel(model, mesh, **(wishes or {}))
    zf.shard(model, stage=3, mesh=mesh, units=Block)
    checkpointing = zf.checkpoint_blocks(model, partition=mesh if is_cut else None, **how)
    model(*batch(0)).backward()
    before, traffic = checkpointing.sent_nbytes, TensorTraffic(tensor)
    model.zero_grad()
    with traffic:
        loss = model(*batch(1))
        kept = checkpointing.nbytes
        loss.backward()
    peak = 0 if checkpointing.store is None else checkpointing.store.peak_device_nbytes
    sent = checkpointing.sent_nbytes - before
    gradients = [zf.full_grad(p) for p in model.parameters()]
    assert sum(checkpointing.nbytes.values()) == 0
    checkpointing.remove()
    zf.close(model)
    return Step(kept, peak, sent, traffic.nbytes, traffic.calls, [g for g in gradients if g is not None])


class Compared(NamedTuple):
    kept: dict[str, int]
    peak: int
    sent: int
    share: float  # of what the layers send
    calls: int  # of the layers
    is_same: bool  # gradients, to the bit


def compared(tensor: int, **how: Any) -> Compared:
    plain = second_step(tensor, is_cut=False)
    step = second_step(tensor, is_cut=True, **how)
    is_same = len(plain.gradients) == len(step.gradients) and all(map(torch.equal, plain.gradients, step.gradients))
    return Compared(step.kept, step.peak, step.sent, step.sent / step.tensor_sent, step.calls, is_same)


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_rank_keeps_its_part_and_sends_a_tenth_at_most(ranks: Any, tensor: int) -> None:
    """Of b·s·h elements a block gathers one tensor, beside two all-reduces in forward, two in backward, and one when
    it is computed again; the embedding and the head send besides.
    """
    for found in ranks(tensor, compared, tensor):
        assert found.kept == {"device": LAYERS * WHOLE // tensor, "host": 0, "nvme": 0}
        assert found.sent == LAYERS * WHOLE * (tensor - 1) // tensor
        assert found.calls >= 5 * LAYERS
        assert 0.05 < found.share <= 0.1
        assert found.is_same


def test_on_the_host_two_blocks_are_on_the_device_at_most(ranks: Any) -> None:
    for found in ranks(2, compared, 2, keep="host"):
        pages = -(-(WHOLE // 2) // 4096) * 4096
        assert found.kept == {"device": 2 * WHOLE, "host": LAYERS * pages, "nvme": 0}
        assert found.peak <= 2 * WHOLE
        assert found.is_same


def with_parts_of_the_sequence() -> tuple[list[str], Step]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = second_step(2, is_cut=True, wishes={"sequence_parallel": True}, keep="host")
    return [str(each.message) for each in caught if "partition=" in str(each.message)], step


def test_parts_of_the_sequence_are_kept_as_they_are_and_it_is_said(ranks: Any) -> None:
    """The first block, which cuts the sequence, has it whole."""
    for (said,), step in ranks(2, with_parts_of_the_sequence):
        assert "each of 2 tensor ranks has a part of the sequence" in said
        assert step.sent == 0
        assert step.kept["host"] == WHOLE + (LAYERS - 1) * WHOLE // 2
