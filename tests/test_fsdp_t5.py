"""The source documents' FSDP examples, as written there but for the import, on a T5 of two small layers."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import largest_difference
from torch import nn, optim
from torch.cuda import nccl
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.torch_version import TorchVersion as LooseVersion

import zerofold as zf
from zerofold.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from zerofold.fsdp import MixedPrecision, ShardingStrategy, transformer_auto_wrap_policy

HAS_CUDA = torch.cuda.is_available()
# The example gives every rank the GPU of its number, and what it is compared with here is on the CPU.
on_the_cpu = pytest.mark.skipif(HAS_CUDA, reason="tests/test_gpu_faces.py runs it on a GPU")

fpSixteen = MixedPrecision(  # noqa: N816
    param_dtype=torch.float16,
    # Gradient communication precision.
    reduce_dtype=torch.float16,
    # Buffer precision.
    buffer_dtype=torch.float16,
)

bfSixteen = MixedPrecision(  # noqa: N816
    param_dtype=torch.bfloat16,
    # Gradient communication precision.
    reduce_dtype=torch.bfloat16,
    # Buffer precision.
    buffer_dtype=torch.bfloat16,
)


def setup_model(name: str) -> tuple[Any, Any]:
    """A T5 of the same shape as "t5-base", only smaller, with its embeddings tied."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(3)
    config = T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), None


def loader(rank: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    ids = [torch.randint(1, 64, (2, 14), generator=generator) for _ in range(2)]
    ids = [each.cuda() for each in ids] if HAS_CUDA else ids
    return [{"input_ids": each[:, :8], "labels": each[:, 8:].contiguous()} for each in ids]


def train(
    args: Any,
    model: Any,
    rank: int,
    world_size: int,
    train_loader: Any,
    optimizer: Any,
    epoch: int,
    sampler: Any = None,
) -> float:
    total = 0.0
    for batch in train_loader:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        total += loss.item()
    args.losses.append(total)
    return total


# fmt: off
def fsdp_main(args: Any) -> Any:
    from transformers.models.t5.modeling_t5 import T5Block

    model, tokenizer = setup_model("t5-base")  # noqa: RUF059

    local_rank = int(os.environ['LOCAL_RANK'])
    rank = int(os.environ['RANK'])
    world_size = int(os.environ['WORLD_SIZE'])

    # Set dataset and dataloader here
    train_loader, sampler1 = loader(rank), None

    t5_auto_wrap_policy = functools.partial(
        transformer_auto_wrap_policy,
        transformer_layer_cls={
            T5Block,
        },
    )
    sharding_strategy: ShardingStrategy = ShardingStrategy.SHARD_GRAD_OP #for Zero2 and FULL_SHARD for Zero3
    if HAS_CUDA:
        torch.cuda.set_device(local_rank)

    bf16_ready = (
    torch.version.cuda
    and torch.cuda.is_bf16_supported()
    and LooseVersion(torch.version.cuda) >= "11.0"
    and dist.is_nccl_available()
    and nccl.version() >= (2, 10)
    )

    if bf16_ready:
        mp_policy = bfSixteen
    else:
        mp_policy = None # defaults to fp32
    mp_policy = args.precision or mp_policy

    # model is on CPU before input to FSDP
    model = FSDP(model,
        auto_wrap_policy=t5_auto_wrap_policy,
        mixed_precision=mp_policy,
        sharding_strategy=sharding_strategy if args.held else None,
        **({"device_id": torch.cuda.current_device()} if HAS_CUDA else {}))

    optimizer = optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    for epoch in range(1, args.epochs + 1):
        train_accuracy = train(args, model, rank, world_size, train_loader, optimizer, epoch, sampler=sampler1)  # noqa: F841
        scheduler.step()
    return model
# fmt: on


def run_t5(precision: MixedPrecision | None, held: bool) -> tuple[float, list[float], list[float]]:
    """How far the weights are from DDP's, and the losses of both."""
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    try:
        args = SimpleNamespace(lr=1e-2, gamma=0.7, epochs=3, losses=[], precision=precision, held=held)
        model = fsdp_main(args)
    finally:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
    found = model.state_dict()
    assert found["shared.weight"] is found["lm_head.weight"]
    zf.close(model)

    reference = SimpleNamespace(losses=[])
    plain, _ = setup_model("t5-base")
    ddp = DistributedDataParallel(plain)
    optimizer = optim.AdamW(ddp.parameters(), lr=1e-2)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    data = loader(dist.get_rank())
    for epoch in range(3):
        train(reference, ddp, 0, 2, data, optimizer, epoch)
        scheduler.step()
    expected = plain.state_dict()
    difference = largest_difference([found[name] for name in expected], list(expected.values()))
    return difference, args.losses, reference.losses


@on_the_cpu
@pytest.mark.parametrize("held", [False, True])
def test_the_t5_example_equals_ddp(ranks: Any, held: bool) -> None:
    for difference, losses, expected in ranks(2, run_t5, None, held):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert difference <= 1e-5


@on_the_cpu
@pytest.mark.parametrize("precision", [bfSixteen, fpSixteen], ids=["bf16", "fp16"])
def test_the_t5_example_in_16_bits(ranks: Any, precision: MixedPrecision) -> None:
    for _, losses, expected in ranks(2, run_t5, precision, False):
        assert losses[-1] < losses[0]
        assert losses == pytest.approx(expected, abs=0.1)


class MyModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: int, z: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * y + z


def simple_example() -> float:
    my_module, x = MyModule(), torch.ones(2, 4)
    before = my_module.linear.weight.detach().clone()
    if HAS_CUDA:
        torch.cuda.set_device(0)
    sharded_module = FSDP(my_module)

    optim = torch.optim.Adam(sharded_module.parameters(), lr=0.0001)
    x = sharded_module(x, y=3, z=torch.Tensor([1]))

    loss = x.sum()
    loss.backward()
    optim.step()

    after = sharded_module.state_dict()["linear.weight"]
    zf.close(sharded_module)
    return (before - after).mean().item()


def test_the_simple_example(ranks: Any) -> None:
    assert ranks(2, simple_example) == pytest.approx([1e-4, 1e-4], rel=1e-3)
