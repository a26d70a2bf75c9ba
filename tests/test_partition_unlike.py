"""P_a where the tensor ranks do not hold all inputs alike, as with the bias of T5's heads: those are kept whole, the
others are cut, and nothing differs from blocks that keep whole inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofold as zf
import zoo
from ranks import raised
from zerofold.memory.disk_blocks import Block as DiskBlock

TENSOR, SAMPLES, LENGTH, HEADS = 2, 4, 16, 4
STREAM = SAMPLES * LENGTH * zoo.WIDTH * 4  # bytes; of an encoder's result too
BIAS = HEADS // TENSOR * LENGTH * LENGTH * 4
LONG = 256
LONG_BIAS = HEADS // TENSOR * LONG * LONG * 4
BUDGET = 19 * 2**20 // 10  # room for the halves of all inputs, and not for two whole biases


def t5_trained(how: dict[str, Any] | None, *, has_zeros: bool) -> tuple[list[Tensor], dict[str, int]]:
    """What this rank has after three steps, and the bytes kept in the last."""
    torch.set_num_threads(1)
    mesh = zf.mesh(tensor=TENSOR, device="cpu")
    torch.manual_seed(3)
    model = zoo.t5()
    if has_zeros:
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                nn.init.zeros_(parameter)
    zf.tensor_parallel(model, mesh)
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=2, mesh=mesh)
    checkpointing = None
    if how is not None:
        cut = {"partition": mesh} if how.pop("cuts", True) else {}
        checkpointing = zf.checkpoint_blocks(model, **cut, **how)
    kept: dict[str, int] = {}
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(3, zoo.VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        # What passes through a cache, which checkpoints leave out, is added up in another order.
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        kept = {} if checkpointing is None else checkpointing.nbytes
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert checkpointing is None or sum(checkpointing.nbytes.values()) == 0
    weights = [tensor.clone() for _, tensor in zf.full_tensors(model)]
    zf.close(model)
    return weights, kept


def t5_ways(ways: dict[str, dict[str, Any]], has_zeros: bool) -> dict[str, tuple[bool, dict[str, int]]]:
    """Whether each trains as without checkpoints, and what it keeps."""
    plain, _ = t5_trained(None, has_zeros=has_zeros)
    found = {name: t5_trained(how, has_zeros=has_zeros) for name, how in ways.items()}
    return {name: (all(map(torch.equal, plain, weights)), kept) for name, (weights, kept) in found.items()}


def test_the_bias_of_each_ranks_heads_is_kept_whole_and_the_rest_is_cut(ranks: Any, tmp_path: Path) -> None:
    """Two blocks in the encoder, two in the decoder; in each the first has no bias yet, and makes it."""
    ways: dict[str, dict[str, Any]] = {
        "whole": {"contiguous": True, "cuts": False},
        "device": {},
        "host": {"keep": "host"},
        "nvme": {"keep": "nvme", "path": str(tmp_path)},
    }
    for found in ranks(TENSOR, t5_ways, ways, False):
        assert all(is_same for is_same, _ in found.values()), found
        assert found["whole"][1]["device"] == 5 * STREAM + 2 * BIAS
        assert found["device"][1]["device"] == 5 * STREAM // TENSOR + 2 * BIAS


def test_a_bias_that_begins_with_zeros_is_not_cut_when_it_has_become_another(ranks: Any) -> None:
    """In the first step all ranks have the same."""
    for found in ranks(TENSOR, t5_ways, {"device": {}}, True):
        is_same, kept = found["device"]
        assert is_same
        assert kept["device"] == 5 * STREAM // TENSOR + 2 * BIAS


def added(x: Tensor, own: Tensor) -> Tensor:
    return x + own.exp()


def stream_and_own(*, stream_differs: bool, keep: str = "host") -> tuple[bool, int]:
    """Whether the gradients are right, and the most bytes that were on the device."""
    spread, rank = zf.mesh(tensor=TENSOR, device="cpu"), dist.get_rank()
    store = zf.CheckpointStore(keep, partition=spread)
    own = torch.linspace(0, 1 + rank, 256).requires_grad_()
    x = (torch.ones(256) * (rank if stream_differs else 1)).requires_grad_()
    made = zf.checkpoint(added, x * 1, own * 1, store=store)
    zf.checkpoint(added, made, own * 1, store=store).sum().backward()
    del made
    store.close()
    return torch.equal(own.grad, 2 * own.detach().exp()), store.peak_device_nbytes  # type: ignore[arg-type]


def test_what_is_kept_whole_on_the_device_is_used_where_it_lies(ranks: Any) -> None:
    """By two calls, beside half of the stream of each, and in backward all of it."""
    found = ranks(TENSOR, stream_and_own, stream_differs=False, keep="device")
    assert found == [(True, 2 * (512 + 1024) + 2 * 1024)] * TENSOR


def test_a_stream_that_differs_raises_beside_an_input_that_may(ranks: Any) -> None:
    assert all(is_right for is_right, _ in ranks(TENSOR, stream_and_own, stream_differs=False))
    for message in ranks(TENSOR, raised, stream_and_own_differ):
        assert "ValueError: partition=: the inputs of a checkpoint are not the same on the 2 tensor ranks" in message


def stream_and_own_differ() -> None:
    stream_and_own(stream_differs=True)


def lost(path: str) -> str:
    """Of inputs that are kept whole, in files, one rank cannot read its own. Said on all ranks, which can go on."""
    spread, rank = zf.mesh(tensor=TENSOR, device="cpu"), dist.get_rank()
    store = zf.CheckpointStore("nvme", path=path, partition=spread)

    def summed() -> tuple[Tensor, Tensor]:
        own = torch.linspace(0, 1 + rank, 4096).requires_grad_()
        made = [zf.checkpoint(added, torch.ones(4096), own * index, store=store) for index in range(5)]
        return torch.stack(made).sum(), own

    def fails(*args: Any) -> Any:
        raise OSError(5, "on purpose")

    loss, _ = summed()
    message = ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(DiskBlock, "read", fails)
        try:
            loss.backward()
        except OSError as error:
            message = f"{type(error).__name__}: {error}"
    del loss
    loss, own = summed()
    loss.backward()
    expected = sum(index * (own.detach() * index).exp() for index in range(5))
    assert torch.allclose(own.grad, expected)  # type: ignore[arg-type]
    del loss
    store.close()
    return message


def test_a_disk_that_loses_what_was_kept_whole_ends_the_backward_of_all(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(TENSOR, lost, str(tmp_path)):
        assert "DiskError" in message
        assert "rank 1 has lost its part of the input of a checkpoint: " in message


def t5_auto(budget: int) -> list[tuple[str, str]]:
    """Where inputs wait in each step, and what the choice says. The bias of long sequences is most of them."""
    mesh = zf.mesh(tensor=TENSOR, device="cpu")
    torch.manual_seed(3)
    model = zoo.t5()
    zf.tensor_parallel(model, mesh)
    model, _ = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=2, mesh=mesh)
    checkpointing = zf.checkpoint_blocks(model, keep="auto", partition=mesh, budget=budget)
    found = []
    for _ in range(4):
        tokens = torch.arange(LONG).remainder(zoo.VOCABULARY)[None]
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        store = checkpointing.store
        place = "device" if store is None else f"{'parts, ' * (store.partition is not None)}{store.tier.value}"
        found.append((place, checkpointing.choice))
    checkpointing.remove()
    zf.close(model)
    return found


def test_what_is_kept_whole_is_known_after_a_forward_and_the_choice_is_corrected(ranks: Any) -> None:
    """First streams alone are known, then that there are other inputs, and in parts which of them are not alike."""
    for found in ranks(TENSOR, t5_auto, BUDGET):
        places, said = zip(*found, strict=True)
        assert places == ("device", "parts, device", "parts, host", "parts, host")
        assert "not alike" not in said[1]
        whole = f"{2 * LONG_BIAS / 2**20:.1f} MiB of them, which tensor ranks do not hold alike, are kept whole"
        assert whole in said[2]
