"""States parked in host memory and brought back: the same bits, no memory on the device, no touch without an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import TinyGPT, batches
from tests.ranks import raised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import zerofold as zf
from zerofold.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from zerofold.engine import Engine
from zerofold.park import Parking, offload_states, reload_states
from zerofold.sharded import ShardedTensor

Case = tuple[Any, str | None, str | None, tuple[int, int] | None]  # row, cut, precision, mesh
ROWS: list[Case] = [
    (0, None, None, None),
    (1, None, "bf16", None),
    (2, "whole", None, None),  # with Muon
    (3, None, "bf16", None),
    ("hpz", None, "bf16", (1, 2)),
]
MORE_ROWS: list[Case] = [
    (0, None, "fp16", None),
    (1, None, None, None),
    (2, None, None, None),
    (3, None, None, None),
    (3, "whole", "bf16", None),
    ("dp", None, None, None),
    ("hsdp", None, None, (2, 1)),
    ("hsdp", None, "bf16", (1, 2)),
]


class Counting(TinyGPT):
    def __init__(self) -> None:
        super().__init__(width=32, layers=2)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, indices: Tensor, targets: Tensor) -> Tensor:
        self.seen += indices.float().mean()
        return super().forward(indices, targets)


def prepared(case: Case, device: str = "cpu") -> tuple[Any, list[torch.optim.Optimizer], zf.EMA]:
    row, cut, precision, shape = case
    torch.manual_seed(0)
    model = Counting().to(device)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2] if cut == "whole" else []
    rest = [p for p in model.parameters() if all(p is not other for other in matrices)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=1e-2)]
    optimizers += [torch.optim.Muon(matrices, lr=1e-2)] if matrices else []
    mesh = None if shape is None else init_device_mesh(device, shape, mesh_dim_names=("across", "inside"))
    zf.shard(model, stage=row, cut=cut, precision=precision, mesh=mesh)
    zf.attach(model, *optimizers, clip=1.0)
    return model, optimizers, zf.EMA(model, 0.9)


def memory_of(tensors: Any) -> int:
    held = [tensor._local if isinstance(tensor, ShardedTensor) else tensor for tensor in tensors]
    return sum(tensor.untyped_storage().nbytes() for tensor in held)


def park_and_reload(model: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    engine = Engine.of(model)
    parked = offload_states(model)
    states = [value for each in optimizers for state in each.state.values() for value in state.values()]
    assert memory_of(s for s in states if isinstance(s, Tensor) and s.device == model.seen.device) == 0
    assert memory_of([*model.buffers(), *(slab.raw_shard for slab in engine.slabs())]) == 0
    assert sum(slab.storage.nbytes for slab in engine.slabs()) == engine.pool.nbytes == engine.cache.nbytes == 0
    assert reload_states(model).nbytes == parked.nbytes


def trained(case: Case, parks: bool, device: str = "cpu") -> list[Tensor]:
    """Two steps of two micro-batches each, the first under no_sync; and parks wherever one may."""
    model, optimizers, average = prepared(case, device)
    pause = park_and_reload if parks else lambda *_: None
    losses = []
    data = [tuple(t.to(device) for t in batch) for batch in batches(4)]
    for first, second in zip(data[::2], data[1::2], strict=True):
        with sdpa_kernel(SDPBackend.MATH):  # the others may add up in any order on a GPU
            with zf.no_sync(model):
                model(*first).backward()
            pause(model, optimizers)
            loss = model(*second)
            pause(model, optimizers)
            loss.backward()
        pause(model, optimizers)
        for optimizer in optimizers:
            optimizer.step()
        pause(model, optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.detach())
    states = [value for each in optimizers for state in each.state.values() for value in state.values()]
    found = [*average.state_dict().values(), *(s for s in states if isinstance(s, Tensor))]
    local = [each.local if isinstance(each, ShardedTensor) else each for each in found]  # owners have different ones
    result = [each.clone() for each in (*losses, model.seen, *local)]
    if parks:
        offload_states(model)  # which close brings back
    zf.close(model)
    return [each.detach().cpu() for each in (*result, *model.parameters())]


def differences(case: Case, device: str = "cpu") -> int:
    expected, found = trained(case, parks=False, device=device), trained(case, parks=True, device=device)
    assert len(expected) == len(found) > 20
    return sum(not torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_training_goes_on_to_the_bit(ranks: Any, case: Case) -> None:
    assert ranks(2, differences, case) == [0, 0]


@pytest.mark.parametrize("case", MORE_ROWS, ids=str)
def test_training_goes_on_to_the_bit_on_every_row(ranks: Any, case: Case) -> None:
    assert ranks(2, differences, case) == [0, 0]


@pytest.mark.parametrize("stage", [0, 3])
def test_alone(ranks: Any, stage: int) -> None:
    assert ranks(1, differences, (stage, None, "bf16", None)) == [0]


def touches(stage: int, precision: str | None, folder: Path) -> dict[str, str]:
    """What each touch of a parked model says."""
    model, (optimizer,), average = prepared((stage, None, precision, None))
    first, second, third = batches(3)
    model(*first).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(*second).backward()
    waiting = model(*third)
    weight, inner = model.head.weight, model.blocks[0].up
    state = next(iter(optimizer.state.values()))["exp_avg"]
    gradient = weight.grad
    offload_states(model)

    def enter_full_params() -> None:
        with zf.full_params(model):
            pass

    errors = {
        "forward": raised(model, *first),
        "inner forward": raised(inner, torch.ones(1, 32)),
        "backward": raised(waiting.backward),
        "step": raised(optimizer.step),
        "full": raised(zf.full, weight),
        "state": raised(zf.full, state),
        "gradient": raised(lambda: weight.grad + 1),
        "gradient held": raised(lambda: gradient * 2),
        "average": raised(lambda: [zf.full(each) for each in average.state_dict().values()]),
        "full_params": raised(enter_full_params),
        "save": raised(zf.save, model, optimizer, folder),
        "state_dict": raised(model.state_dict),
        "clip": raised(zf.clip_grad_norm_, model, 1.0),
        "buffer": raised(model.seen.sum),
        "zero": raised(optimizer.zero_grad, set_to_none=False),
        "again": raised(offload_states, model),
    }
    reload_states(model)
    errors["not parked"] = raised(reload_states, model)
    with zf.full_params(model):
        errors["inside"] = raised(offload_states, model)
    waiting.backward()  # the graph is whole again
    optimizer.step()
    assert "_arrive" not in vars(model.seen)  # which a file would hold
    errors["unknown"] = raised(offload_states, model, ["weights"])
    errors["text"] = raised(offload_states, model, "optimizer")
    zf.close(model)
    return errors


@pytest.mark.parametrize(("stage", "precision"), [(0, None), (3, "bf16")])
def test_every_touch_says_what_to_do(ranks: Any, tmp_path: Path, stage: int, precision: str | None) -> None:
    for errors in ranks(2, touches, stage, precision, tmp_path):
        assert "'weights' in include is no state" in errors.pop("unknown")
        assert "must be a list of states, such as ['optimizer']" in errors.pop("text")
        assert "nothing of this model is parked" in errors.pop("not parked")
        assert "offload_states inside `with zf.full_params(model)`" in errors.pop("inside")
        for touch, error in errors.items():
            assert "are parked in host memory: call zf.reload_states(model) first" in error, (touch, error)
    assert not list(tmp_path.iterdir())


def generate_without_optimizer(stage: int, folder: Path) -> tuple[Parking, float, list[str]]:
    model, (optimizer,), _ = prepared((stage, None, "bf16", None))
    first, second = batches(2)
    model(*first).backward()
    optimizer.step()
    with torch.no_grad():
        expected = model(*second)
    parked = offload_states(model, ["optimizer", "gradients"])
    with torch.no_grad():
        found = model(*second)
    with zf.full_params(model, masters=False), torch.no_grad():
        model(*second)
    zf.full(model.head.weight)
    loss = model(*second)
    errors = [raised(loss.backward), raised(optimizer.step), raised(zf.save, model, optimizer, folder)]
    reload_states(model)
    zf.close(model)
    return parked, (found - expected).abs().max().item(), errors


@pytest.mark.parametrize("stage", [1, 3])
def test_the_model_runs_while_only_its_optimizer_is_parked(ranks: Any, tmp_path: Path, stage: int) -> None:
    for parked, difference, errors in ranks(2, generate_without_optimizer, stage, tmp_path):
        assert difference == 0.0
        assert list(parked.nbytes) == ["optimizer", "gradients"]
        assert parked.total_nbytes == sum(parked.nbytes.values()) > 0
        assert str(parked).startswith("0.00 GiB in ")
        assert all("optimizer, gradients of this model are parked" in error for error in errors), errors


def under_deepspeeds_names() -> list[Any]:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine = zf.initialize(model=Counting(), config=config)[0]
    first, second = batches(2)
    engine.backward(engine(*first))
    engine.step()
    parked = engine.offload_states(include=[OffloadStateTypeEnum.optim_states, "lp_grads"], non_blocking=True)
    loss = engine(*second)
    engine.reload_states()
    everything = engine.offload_states(device=OffloadDeviceEnum.cpu)
    refused = raised(engine, *second)
    engine.reload_states(non_blocking=True)
    engine.backward(loss)
    engine.step()
    wrong = [raised(engine.offload_states, **each) for each in ({"device": "nvme"}, {"include": ["weights"]})]
    engine.destroy()
    return [list(parked.nbytes), list(everything.nbytes), refused, *wrong]


def test_the_deepspeed_engine_has_it_too(ranks: Any) -> None:
    for some, everything, refused, device, state in ranks(2, under_deepspeeds_names):
        assert some == ["optimizer", "gradients"]
        assert everything == ["parameters", "buffers", "optimizer", "gradients"]
        assert "call zf.reload_states(model) first" in refused
        assert "device='nvme'" in device
        assert "'weights' in include is none of optim_states" in state


def a_block_is_crossed() -> bool:
    """More bytes than one block of host memory holds."""
    model = nn.Linear(4500, 4500, bias=False)
    zf.shard(model, stage=0)
    before = model.weight.detach().clone()
    offload_states(model)
    reload_states(model)
    return torch.equal(before, model.weight)


def test_states_larger_than_a_block(ranks: Any) -> None:
    assert ranks(1, a_block_is_crossed) == [True]
