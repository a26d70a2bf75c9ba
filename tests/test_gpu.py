"""The same parity on a GPU. Two ranks share one GPU through gloo: slow, but real streams and real gathers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.models import batches, largest_difference, make_model
from tests.test_precision import rows_against_by_hand
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zerofold as zf

STAGES = (0, 1, 2, 3)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def against_ddp(device: str, settings: dict[str, Any], rows: tuple[Any, ...] = STAGES) -> dict[Any, float]:
    data = [tuple(t.to(device) for t in batch) for batch in batches(6)]

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for batch in data:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    reference = make_model().to(device)
    train(DistributedDataParallel(reference), torch.optim.SGD(reference.parameters(), lr=0.1))
    expected = [p.detach() for p in reference.parameters()]
    found = {}
    for row in rows:
        stage, cut = row if isinstance(row, tuple) else (row, None)
        if stage in ("hsdp", "hpz"):
            settings = {**settings, "mesh": init_device_mesh(device, (dist.get_world_size(), 1))}
        model = make_model().to(device)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = zf.prepare(model, optimizer, stage=stage, cut=cut, **settings)
        train(model, optimizer)
        zf.close(model)
        found[row] = largest_difference(expected, [p.detach() for p in model.parameters()])
    return found


@needs_gpu
@pytest.mark.parametrize("settings", [{}, {"overlap": False}, {"buffer_bytes": 8192}])
@pytest.mark.parametrize("world", [1, 2])
def test_stages_equal_ddp_on_a_gpu(ranks: Any, world: int, settings: dict[str, Any]) -> None:
    for per_stage in ranks(world, against_ddp, "cuda", settings):
        assert all(difference <= 1e-6 for difference in per_stage.values()), per_stage


@needs_gpu
@pytest.mark.parametrize("world", [1, 2])
def test_the_other_rows_equal_ddp_on_a_gpu(ranks: Any, world: int) -> None:
    rows = ("dp", (1, "whole"), (2, "whole"), (3, "whole"), "hsdp", "hpz")
    for per_row in ranks(world, against_ddp, "cuda", {}, rows):
        assert all(difference <= 1e-6 for difference in per_row.values()), per_row


def compiled_and_eager(stage: int) -> float:
    def train(compiled: bool) -> list[torch.Tensor]:
        torch.compiler.reset()
        model = make_model(key_bias=False).cuda()
        if compiled:
            for block in model.blocks:
                block.compile(fullgraph=True)
        model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        for batch in batches(4):
            model(*(t.cuda() for t in batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        zf.close(model)
        return [p.detach() for p in model.parameters()]

    return largest_difference(train(False), train(True))


@needs_gpu
@pytest.mark.parametrize("stage", [0, 3])
def test_compiled_blocks_agree_with_eager_ones_on_a_gpu(ranks: Any, stage: int) -> None:
    assert max(ranks(2, compiled_and_eager, stage)) <= 1e-5


def from_meta_to_the_gpu() -> tuple[str, bool]:
    with torch.device("meta"):
        model = make_model()
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    (batch,) = batches(1)
    model(*(t.cuda() for t in batch)).backward()
    optimizer.step()
    zf.close(model)
    return model.head.weight.device.type, all(p.isfinite().all().item() for p in model.parameters())


@needs_gpu
def test_a_model_on_the_meta_device_goes_to_the_gpu(ranks: Any) -> None:
    assert ranks(2, from_meta_to_the_gpu) == [("cuda", True)] * 2


def loaded_and_exported(folder: Path, device: str, stage: int, precision: str | None) -> bool:
    """A folder read onto the device, written again, and the tensors in between: all the same bits."""
    expected = make_model().state_dict()
    if dist.get_rank() == 0:
        save_file(expected, folder / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = make_model()
    zf.shard(model, stage=stage, precision=precision, device=device, load=folder)
    streamed = dict(zf.full_tensors(model))
    zf.export(model, folder / "out")
    (batch,) = batches(1)
    model(*(t.to(device) for t in batch)).backward()
    zf.close(model)
    written = load_file(folder / "out" / "model.safetensors")
    on_device = all(tensor.device.type == device for tensor in streamed.values())
    same = all(torch.equal(streamed[n].cpu(), t) and torch.equal(written[n], t) for n, t in expected.items())
    return on_device and same


@needs_gpu
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (2, 2), (2, 3)])
def test_weights_go_from_a_folder_to_the_gpu_and_back(
    ranks: Any, tmp_path: Path, world: int, stage: int, precision: str | None
) -> None:
    assert ranks(world, loaded_and_exported, tmp_path, "cuda", stage, precision) == [True] * world


@needs_gpu
@pytest.mark.parametrize("world", [1, 2])
def test_bf16_on_masters_equals_by_hand_on_a_gpu(ranks: Any, world: int) -> None:
    """AdamW through the Triton kernel, against torch's fused one: a last bit may round a bf16 weight the other way,
    and then a gradient moves by a 256th. The updates are of 4e-3."""
    for found in ranks(world, rows_against_by_hand, "cuda", (0, 1, 2, 3, (2, "whole"), (3, "whole"))):
        assert all(found[name] <= (1e-6 if name.startswith("sgd") else 1e-4) for name in found), found


def steps_on_a_gpu(precision: str, stage: int, compiled: bool) -> tuple[float, float, float, int]:
    """First and last loss, the largest gap between kept 16-bit parameters and their masters, skipped steps."""
    torch.compiler.reset()
    model = make_model(key_bias=False).cuda()
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
    keep = [torch.nn.LayerNorm] if precision != "tf32" else None
    policies = {
        "bf16": zf.Precision(parameters=torch.bfloat16, keep=keep),
        "fp16": zf.Precision(parameters=torch.float16, keep=keep),
        "bf16 states": zf.Precision(parameters=torch.bfloat16, moments=torch.bfloat16, master=torch.bfloat16),
    }
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    policy = policies.get(precision, precision)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, precision=policy, clip=1.0)
    average = zf.EMA(model, decay=0.9)
    (batch,) = batches(1)
    losses = []
    for _ in range(20):
        loss = model(*(t.cuda() for t in batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with average.swapped():
        model(*(t.cuda() for t in batch))
    with zf.full_params(model, masters=False):
        copies = [p.detach().float().clone() for p in model.parameters()]
    info = zf.last_step(model)
    assert info is not None
    zf.close(model)
    gap = largest_difference(copies, [p.detach().to(torch.float32) for p in model.parameters()])
    return losses[0], losses[-1], gap, info.skipped_total


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "bf16 states"])
@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 2), (2, 3)])
def test_precisions_train_on_a_gpu(ranks: Any, world: int, stage: int, precision: str, compiled: bool) -> None:
    for first, last, gap, skipped in ranks(world, steps_on_a_gpu, precision, stage, compiled):
        assert last < first - 0.5
        assert gap < 0.01  # rounding of weights below 4, and no more
        assert skipped <= (4 if precision == "fp16" else 0)


def run_out_of_memory() -> tuple[str, float]:
    """A forward whose activations do not fit what this process may have; then one that does."""
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    try:
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
        model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3, units=torch.nn.Linear)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model(torch.ones(2**19, 1024, device="cuda"))
        caught.value.__traceback__ = None  # which keeps the activations
        torch.cuda.empty_cache()
        loss = model(torch.ones(4, 1024, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        note = caught.value.__notes__[0]
        zf.close(model)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return note, loss.item()


@needs_gpu
def test_out_of_memory_tells_what_is_held(ranks: Any) -> None:
    ((note, loss),) = ranks(1, run_out_of_memory)
    assert "zerofold: out of memory on cuda:0" in note
    assert "everything else of this process (activations, other models)" in note
    assert loss == loss


def saved_on_a_gpu(folder: str, device: str, stage: int, *, saves: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of steps 3 to 6, after a save in the background or after loading it."""
    model = make_model(key_bias=False).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, precision="bf16" if device == "cuda" else "fp32")
    data, losses = batches(6), []
    if not saves:
        zf.load(model, optimizer, folder)
    for step in range(0 if saves else 3, 6):
        if step == 3 and saves:
            zf.stage(model, optimizer)
            zf.save(model, optimizer, folder, background=True)
        loss = model(*(t.to(device) for t in data[step]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = [zf.full(p).cpu() for p in model.parameters()]
    zf.close(model)
    return losses[-3:], found


@needs_gpu
@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 2), (2, 3)])
def test_a_checkpoint_of_a_gpu_loads_there_and_on_the_cpu(ranks: Any, tmp_path: Any, world: int, stage: int) -> None:
    expected, weights = ranks(world, saved_on_a_gpu, str(tmp_path), "cuda", stage, saves=True)[0]
    losses, again = ranks(world, saved_on_a_gpu, str(tmp_path), "cuda", stage, saves=False)[0]
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    losses, _ = ranks(world, saved_on_a_gpu, str(tmp_path), "cpu", 3, saves=False)[0]
    assert losses == pytest.approx(expected, abs=0.05)
