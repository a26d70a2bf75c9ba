"""Fingerprints of tensors, and replicas that are compared by them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import batches, make_model
from tests.ranks import raised
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zerofold as zf
from zerofold.engine import Engine
from zerofold.fingerprints import combine, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.bool, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fingerprint_does_not_depend_on_the_cut(dtype: torch.dtype) -> None:
    whole = (torch.randn(50, 31) * 10).to(dtype)
    flat = whole.reshape(-1)
    for bounds in ([0, 1550], [0, 1, 1550], [0, 400, 401, 401, 1550]):
        pieces = [fingerprint(flat[low:high], low) for low, high in pairwise(bounds)]
        assert combine(*pieces) == fingerprint(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_flipped_bit_and_every_swap_is_seen(dtype: torch.dtype) -> None:
    whole = (torch.randn(40) * 10).to(dtype)
    before = fingerprint(whole)
    data = whole.view(torch.uint8)
    for place in range(data.numel()):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert fingerprint(whole) != before
            data[place] ^= 1 << bit
    swapped = whole.clone()
    swapped[[3, 30]] = whole[[30, 3]]
    assert fingerprint(swapped) != before
    assert fingerprint(whole) == before


def test_long_tensors_go_through_in_chunks() -> None:
    whole = torch.randn(2**20 * 2 + 5)
    cut = 2**20 + 3
    assert fingerprint(whole) == combine(fingerprint(whole[:cut]), fingerprint(whole[cut:], cut))
    assert 0 <= fingerprint(whole) < 2**64


def flip_one_bit(tensor: Tensor) -> None:
    tensor.view(-1)[:1].view(torch.uint8)[0] ^= 1


def train_with_a_flipped_bit(stage: int | str, where: str, precision: str | None, check: bool = True) -> str:
    """One step alike, a bit flipped on rank 1 before the second step's update; the error, and that a repair helps."""
    model = make_model()
    model.register_buffer("steady", torch.ones(3))
    mesh = init_device_mesh("cpu", (3, 1)) if stage == "hsdp" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = 2 if check else None
    model, optimizer = zf.prepare(model, optimizer, stage=stage, mesh=mesh, precision=precision, check_replicas=every)
    data = list(batches(4))

    def step(batch: Any, flip: bool) -> None:
        model(*batch).backward()
        if flip and dist.get_rank() == 1:
            slab = Engine.of(model).slabs()[-1]
            flip_one_bit({"parameter": slab.kept_view(0), "shard": slab.shard, "buffer": model.steady}[where].data)
        optimizer.step()
        optimizer.zero_grad()

    step(data[0], False)
    if not check:
        step(data[1], True)
        return "nothing"
    error = raised(step, data[1], True)
    with zf.full_params(model, from_rank=0):
        model.steady.data.fill_(1.0)
    optimizer.zero_grad()
    for batch in data[2:]:
        step(batch, False)
    zf.close(model)
    return error


@pytest.mark.parametrize(
    ("stage", "where", "precision"),
    [
        (0, "parameter", None),
        (0, "shard", "bf16"),
        (1, "parameter", "bf16"),
        (2, "parameter", None),
        ("hsdp", "shard", None),
        (3, "buffer", None),
    ],
)
def test_a_flipped_bit_in_one_replica_is_named(ranks: Any, stage: int | str, where: str, precision: str | None) -> None:
    for error in ranks(3, train_with_a_flipped_bit, stage, where, precision):
        assert error.startswith("ReplicaError: ")
        assert "buffer 'steady'" in error if where == "buffer" else "blocks.2." in error
        assert "rank 1 has other bits than ranks 0, 2" in error
        assert "found before step 2" in error
        assert "from_rank=0" in error


def test_without_the_check_nothing_is_compared(ranks: Any) -> None:
    assert ranks(3, train_with_a_flipped_bit, 0, "parameter", None, check=False) == ["nothing"] * 3
