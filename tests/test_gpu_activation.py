"""Checkpoints and activations off a real GPU: copies on side streams, the same bits, the memory that stays."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import zerofold as zf
from zerofold.activation.disk_shelf import DiskShelf
from zerofold.activation.reserve import CudaCache, Reserve
from zerofold.bench.gpt import GPT, Block, GPTSize, RandomTokens

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.usefixtures("alone")]

SIZE = GPTSize(vocab=512, width=512, layers=8, heads=8, seq=512)
BATCH = 8
INPUT = BATCH * SIZE.seq * SIZE.width * 2  # bytes, bf16


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def plain_attention() -> Iterator[None]:
    """Fast kernels add up the gradient of queries in any order: two runs of the same differ in the last bits."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def prepared(how: dict[str, Any] | None, stage: int = 3) -> tuple[nn.Module, Any, zf.Checkpointing | None]:
    torch.manual_seed(0)
    model = GPT(SIZE).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, precision="bf16", units=Block)
    return model, optimizer, None if how is None else zf.checkpoint_blocks(model, **how)


def trained(how: dict[str, Any] | None, stage: int = 3, steps: int = 4) -> list[Tensor]:
    model, optimizer, checkpointing = prepared(how, stage)
    data = RandomTokens(SIZE, batch=BATCH, rank=0, device="cuda")
    for step in range(steps):
        model(*data.at(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [zf.full(p) for p in model.parameters()]
    if checkpointing is not None:
        assert sum(checkpointing.nbytes.values()) == 0
    zf.close(model)
    return found


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("stage", [0, 3])
def test_the_same_bits_wherever_inputs_wait(stage: int, tmp_path: Path) -> None:
    plain = trained({}, stage)
    ways: list[dict[str, Any]] = [{"keep": "host"}, {"keep": "host", "every": 2}, {"contiguous": True}]
    ways += [{"keep": "host", "use_reentrant": True}, {"keep": "nvme", "path": str(tmp_path)}]
    for how in ways:
        assert all(map(torch.equal, plain, trained(how, stage))), how


def test_two_blocks_inputs_at_most_are_on_the_device() -> None:
    """By the allocator, after forward: what is there with everything on the device, less what is on the host."""

    def after_forward(how: dict[str, Any]) -> int:
        model, optimizer, checkpointing = prepared(how)
        data = RandomTokens(SIZE, batch=BATCH, rank=0, device="cuda")
        found = 0
        for step in range(3):
            before = torch.cuda.memory_allocated()
            loss = model(*data.at(step))
            torch.cuda.synchronize()
            found = torch.cuda.memory_allocated() - before
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        if how:
            assert checkpointing is not None
            assert checkpointing.store is not None
            assert checkpointing.store.peak_device_nbytes == 2 * INPUT
        zf.close(model)
        return found

    assert after_forward({}) - after_forward({"keep": "host"}) == pytest.approx((SIZE.layers - 2) * INPUT, rel=0.05)


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("keep", ["host", "nvme"])
def test_a_slow_copy_is_waited_for(keep: str, tmp_path: Path) -> None:
    """The device is kept busy behind each block, so that copies are late and memory would be used again too early. With
    files the host does not run ahead of it: it would read all of them into its memory.
    """
    plain = trained({})

    def late(module: nn.Module, args: Any) -> None:
        torch.cuda._sleep(2_000_000)

    how: dict[str, Any] = {"keep": keep} if keep == "host" else {"keep": keep, "path": str(tmp_path)}
    model, optimizer, checkpointing = prepared(how)
    for block in model.blocks:
        block.register_forward_pre_hook(late)
    data = RandomTokens(SIZE, batch=BATCH, rank=0, device="cuda")
    for step in range(4):
        model(*data.at(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [zf.full(p) for p in model.parameters()]
    if keep == "nvme":
        assert checkpointing is not None
        assert checkpointing.store is not None
        assert isinstance(checkpointing.store._shelf, DiskShelf)
        assert checkpointing.store._shelf.peak_host_nbytes <= 4 * INPUT
        assert checkpointing.store.peak_device_nbytes == 2 * INPUT
    zf.close(model)
    assert all(map(torch.equal, plain, found))


def test_an_input_changed_while_it_is_copied_is_noticed() -> None:
    """Backward runs in a thread of its own, and is where it is told."""
    layers = nn.ModuleList(nn.Linear(1024, 1024, device="cuda") for _ in range(4))
    zf.checkpoint_blocks(layers, keep="host")
    for changed_after in (1, 2, 4):
        x = made = layers[0](torch.ones(4096, 1024, device="cuda", requires_grad=True))
        for index, layer in enumerate(layers[1:], start=1):
            made = layer(made)
            if index == changed_after:
                with torch.no_grad():
                    x.zero_()
        if changed_after == 4:  # never
            made.sum().backward()
            continue
        with pytest.raises(RuntimeError, match=r"shape \(4096, 1024\) that is kept for backward.*changed in place"):
            made.sum().backward()


def test_a_checkpoint_inside_a_checkpoint_keeps_nothing_in_backwards_thread() -> None:
    store, linear = zf.CheckpointStore("host"), nn.Linear(256, 256, device="cuda")

    def gradients(store: zf.CheckpointStore | None) -> list[Any]:
        def outer(x: Tensor) -> Tensor:
            return zf.checkpoint(linear, zf.checkpoint(linear, x, store=store), store=store)

        x = torch.linspace(-1, 1, 256 * 64, device="cuda").view(64, 256).requires_grad_()
        for _ in range(3):
            zf.checkpoint(outer, x * 2, store=store).square().sum().backward()
        found = [x.grad, linear.weight.grad]
        linear.weight.grad = None
        return found

    assert all(map(torch.equal, gradients(None), gradients(store)))
    assert sum(store.nbytes.values()) == 0
    store.close()


def test_activations_of_a_model_that_keeps_everything_leave_the_device() -> None:
    def run(offloads: bool) -> tuple[list[Tensor], int]:
        gc.collect()  # what earlier tests have raised keeps graphs alive
        before = torch.cuda.memory_allocated()
        model, optimizer, _ = prepared(None)
        data = RandomTokens(SIZE, batch=BATCH, rank=0, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        for step in range(3):
            if offloads:
                with zf.offload_activations(model, above="1MiB", together="16MiB"):
                    model(*data.at(step)).backward()
            else:
                model(*data.at(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated() - before
        found = [zf.full(p) for p in model.parameters()]
        zf.close(model)
        return found, peak

    (_, whole), (_, less) = run(offloads=False), run(offloads=True)
    assert less < 0.5 * whole, (less, whole)
    with sdpa_kernel(SDPBackend.MATH):  # the same bits, where attention has any
        (plain, _), (offloaded, _) = run(offloads=False), run(offloads=True)
    assert all(map(torch.equal, plain, offloaded))


def test_cross_entropy_lowers_the_peak_by_the_logits() -> None:
    tokens, vocabulary, width = 8192, 32768, 512
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device="cuda") * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")

    def peak(loss: Any) -> tuple[int, Tensor, Tensor, Tensor]:
        hidden.grad = weight.grad = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = loss()
        found.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return torch.cuda.max_memory_allocated() - before, found.detach(), hidden.grad, weight.grad

    whole = peak(lambda: F.cross_entropy(F.linear(hidden, weight).float(), targets))
    chunked = peak(lambda: zf.cross_entropy(hidden, weight, targets))
    logits = tokens * vocabulary
    assert whole[0] - chunked[0] >= 8 * logits - 4 * 2048 * 16384 * 4, (whole[0], chunked[0])  # fp32 twice
    torch.testing.assert_close(chunked[1], whole[1], rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(chunked[2:], whole[2:], strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()
    wrong = zf.cross_entropy(hidden.detach(), weight.detach(), targets.clone().fill_(vocabulary))
    assert wrong.isnan()


def test_fragmentation_is_shown_and_contiguous_checkpoints_lower_it() -> None:
    """Sequences of many lengths; reserved over allocated, as the ledger shows it."""

    def ratio(how: dict[str, Any]) -> float:
        torch.cuda.empty_cache()
        model, optimizer, _ = prepared(how)
        torch.cuda.reset_peak_memory_stats()
        lengths = random.Random(0)
        for _ in range(40):
            length = lengths.randrange(64, SIZE.seq + 1)
            tokens = torch.randint(0, SIZE.vocab, (BATCH, length), device="cuda")
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = zf.ledger(model).snapshot()["device_memory"]
        assert found["peak_reserved"] >= found["peak_allocated"] > 0
        zf.close(model)
        return float(found["fragmentation"])

    plain, contiguous = ratio({}), ratio({"contiguous": True})
    print(f"reserved over allocated: {plain:.3f} without, {contiguous:.3f} with")
    assert contiguous <= 1.05 * plain


def test_the_cache_becomes_one_segment_up_to_the_peak_which_stays() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    cache = CudaCache(torch.device("cuda", torch.cuda.current_device()))
    start = cache.books().reserved
    for nbytes in (64 << 20, 96 << 20, 128 << 20):  # each too large for what the one before left
        torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    reserved, most = cache.books()
    assert (reserved, most) == (torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated())
    assert reserved - start >= 288 << 20
    reserve = Reserve(cache)
    reserve.end()
    assert reserve.given_back == 1
    found = cache.books()
    assert found.most_allocated == most
    assert max(start, most - (4 << 20)) <= found.reserved <= max(start, most)
