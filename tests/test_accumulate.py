"""zf.accumulate: the gradients of the ordinary loop, with each unit gathered and reduced once a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models import batches, largest_difference, make_model
from tests.ranks import raised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerofold as zf
from zerofold.accumulate import accumulate

MICRO_BATCHES = 3


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch)


def ordinary(model: nn.Module, loss_fn: Callable[..., Tensor], data: list[Any]) -> Tensor:
    losses = []
    for batch in data:
        loss = loss_fn(model, batch)
        (loss / len(data)).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def train(
    way: Callable[..., Tensor],
    model: nn.Module,
    data: list[Any],
    loss_fn: Callable[..., Tensor] = loss_of,
    **settings: Any,
) -> list[Tensor]:
    """Losses and gradients of two steps, and the weights after them."""
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), **settings)
    seen = []
    for _ in range(2):
        loss = way(model, loss_fn, data)
        gradients = [zf.full_grad(p) for p in model.parameters()]
        seen += [loss, *(gradient for gradient in gradients if gradient is not None)]
        optimizer.step()
        optimizer.zero_grad()
    seen += [zf.full(p) for p in model.parameters()]
    zf.close(model)
    return seen


def both(make: Callable[[], nn.Module], data: list[Any], *args: Any, **settings: Any) -> float:
    ways = [train(way, make(), data, *args, **settings) for way in (ordinary, accumulate)]
    assert len(ways[0]) == len(ways[1]) > 5
    return largest_difference(*ways)


def gpt(row: Any, precision: str | None, device: str = "cpu", **settings: Any) -> float:
    if row in ("hsdp", "hpz"):
        settings["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("across", "inside"))
    data = [tuple(tensor.to(device) for tensor in batch) for batch in batches(MICRO_BATCHES)]
    return both(lambda: make_model().to(device), data, stage=row, precision=precision, clip=0.5, **settings)


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("row", [0, 3])
def test_one_rank_gives_the_bits_of_the_loop(ranks: Any, row: int, precision: str | None) -> None:
    assert ranks(1, gpt, row, precision) == [0.0]


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("row", [0, 1, 2, 3, "hsdp", "hpz", "dp"])
def test_two_ranks(ranks: Any, row: Any, precision: str | None) -> None:
    assert max(ranks(2, gpt, row, precision)) < 2e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2])
def test_on_a_gpu(ranks: Any, world: int, precision: str | None) -> None:
    """Kernels that add up with atomics give other bits each time."""
    assert max(ranks(world, gpt, 3, precision, "cuda")) < (1e-5 if precision is None else 2e-3)


def test_whole_gradients_with_accumulation_are_equal_to_the_bit(ranks: Any) -> None:
    """There the loop too reduces once."""
    assert ranks(2, gpt, 1, None, accumulate=MICRO_BATCHES) == [0.0, 0.0]


def traffic(micro_batches: int, live_bytes: int) -> tuple[dict[str, int], dict[str, dict[str, int]], int]:
    """Of the second step."""
    model, optimizer = zf.prepare(
        (model := make_model(layers=6)), torch.optim.SGD(model.parameters(), lr=0.1), stage=3, live_bytes=live_bytes
    )
    for _ in range(2):
        before, units_before = zf.ledger(model).snapshot(), zf.ledger(model).by_unit()
        accumulate(model, loss_of, list(batches(micro_batches)))
        after, units = zf.ledger(model).snapshot(), zf.ledger(model).by_unit()
        optimizer.step()
        optimizer.zero_grad()
    sent = {name: count - before["comm_bytes"].get(name, 0) for name, count in after["comm_bytes"].items()}
    by_unit = {
        unit: {name: count - units_before[unit][name] for name, count in table.items()}
        for unit, table in units.items()
        if unit.startswith("blocks")
    }
    assert after["peak_live_bytes"] <= live_bytes
    parameters = sum(p.numel() for p in model.blocks[0].parameters())
    zf.close(model)
    return sent, by_unit, parameters


@pytest.mark.parametrize("live_bytes", [120_000, 2**30])
def test_each_unit_is_gathered_twice_and_reduced_once_a_step(ranks: Any, live_bytes: int) -> None:
    one, four = ranks(2, traffic, 1, live_bytes), ranks(2, traffic, 4, live_bytes)
    assert four == one
    _, by_unit, parameters = four[0]
    once = 4 * parameters / 2  # fp32, from one rank to the other
    for unit, table in by_unit.items():
        # What forward has gathered stays for backward where there is room: the last one, or all.
        gathers = 2 if live_bytes < 2**30 and unit != "blocks.5" else 1
        assert sum(table.values()) == pytest.approx((gathers + 1) * once, rel=0.02)


class Stack(nn.Module):
    """Blocks of a kind, with something unusual about how they are called."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Odd(kind) for _ in range(3))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        start = shared = self.first(x)
        x, seen = start, []
        scale = x.square().mean(-1, keepdim=True)  # used between all units
        if self.kind == "kept":
            self.scale = scale
        for block in [*self.blocks, *self.blocks] if self.kind == "twice" else self.blocks:
            if self.kind == "skipped" and block is self.blocks[1] and scale.mean() > 0.25:
                continue
            seen.append(x)
            out = block(x + 0 if self.kind == "eats" else x, shared, {"steps": [scale]})
            x = out["x"] if isinstance(out, dict) else out
            if self.kind == "in_place":
                x += 0.1
            x = x * (self.scale if self.kind == "kept" else scale) + seen[0]
        if self.kind == "left":
            x = x + self.blocks[0].penalty
        return self.last(x).square().mean()


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5 if kind == "dropout" else 0.0)

    def forward(self, x: Tensor, shared: Tensor, more: dict[str, Any]) -> Any:
        if self.kind == "raises" and x.shape[0] == 5:
            raise KeyError("no such batch")
        if self.kind == "eats":
            x *= 2
        more["steps"].append(x)  # as a cache that each layer fills: it must be as it was when this runs again
        out = self.dropout(self.linear(x).tanh()) + shared * len(more["steps"]) * more.pop("steps")[0]
        self.penalty = out.mean() if self.kind == "left" else None
        return {"x": out, "count": 1} if self.kind == "twice" else out


def odd(kind: str, stage: int = 3) -> tuple[float, list[str]]:
    """Three micro-batches; one where random numbers are drawn, since their order is another with several."""

    def make() -> Stack:
        torch.manual_seed(0)
        return Stack(kind)

    torch.manual_seed(1)
    data = [(torch.randn(4, 8) * size,) for size in ([1.0] if kind == "dropout" else [1.0, 0.3, 2.0])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        difference = both(make, data, stage=stage, units=Odd)
    return difference, [str(warning.message) for warning in caught if "zf.accumulate" in str(warning.message)]


@pytest.mark.parametrize("kind", ["plain", "twice", "skipped", "in_place", "dropout"])
def test_unusual_models(ranks: Any, kind: str) -> None:
    ((difference, warned),) = ranks(1, odd, kind)
    assert difference < 1e-6
    assert warned == []


def test_a_model_that_keeps_something_between_units_runs_in_the_ordinary_order(ranks: Any) -> None:
    ((difference, warned),) = ranks(1, odd, "kept")
    assert difference < 1e-6
    assert len(warned) == 2  # one a step
    assert "once per micro-batch" in warned[0]
    assert "'scale' was set on the model" in warned[0]


def refused(kind: str) -> tuple[str, bool, float]:
    """What was raised; whether memory and gradients are as before; how the model trains on."""
    torch.manual_seed(0)
    model, optimizer = zf.prepare(
        (model := Stack(kind)), torch.optim.SGD(model.parameters(), lr=0.1), stage=3, units=Odd
    )
    data = [(torch.randn(size, 8),) for size in (4, 5, 4)]
    error = raised(accumulate, model, loss_of, data)
    is_clean = all(p.grad is None for p in model.parameters()) and all(
        type(p) is zf.ShardedParameter for p in model.parameters()
    )
    model.kind = "plain"
    for block in model.blocks:
        block.kind, block.penalty = "plain", None
    ways = []
    for way in (ordinary, accumulate):
        way(model, loss_of, data)
        ways.append([zf.full_grad(p) for p in model.parameters()])
        optimizer.zero_grad()
    zf.close(model)
    return error, is_clean, largest_difference(*ways)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raises", "KeyError: 'no such batch'"),
        ("left", "unit 'blocks.0' leaves a result with a gradient on its module ('penalty')"),
        ("eats", "an input of unit 'blocks.2' was changed in place"),
    ],
)
def test_what_fails_leaves_nothing_behind(ranks: Any, kind: str, message: str) -> None:
    for error, is_clean, difference in ranks(2, refused, kind):
        assert message in error
        assert is_clean
        assert difference < 1e-6


def wrong_calls() -> list[str]:
    model, _ = zf.prepare((model := nn.Linear(4, 1)), torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    data = [torch.randn(2, 4)]
    errors = [
        raised(accumulate, model, lambda model, batch: model(batch).sum(), []),
        raised(accumulate, model, lambda model, batch: model(batch), data),
        raised(accumulate, model, lambda model, batch: model(batch).sum().item(), data),
        raised(accumulate, model, lambda model, batch: model(batch).sum().detach(), data),
        raised(accumulate, model, lambda model, batch: accumulate(model, lambda *_: None, [1]), data),
        raised(torch.no_grad()(accumulate), model, lambda model, batch: model(batch).sum(), data),
        raised(accumulate, model, data, lambda model, batch: model(batch).sum()),
    ]
    zf.close(model)
    engine, *_ = zf.initialize(
        model=nn.Linear(4, 1),
        config={"train_batch_size": 4, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"}},
    )
    errors.append(raised(accumulate, engine, lambda model, batch: model(batch).sum(), data))
    engine.destroy()
    return errors


def test_wrong_calls_are_told(ranks: Any) -> None:
    (errors,) = ranks(1, wrong_calls)
    expected = [
        "batches is empty",
        "loss_fn returned a tensor of shape (2, 1)",
        "loss_fn returned float",
        "without a graph",
        "inside a forward or a backward",
        "inside torch.no_grad()",
        "loss_fn is a list and batches a function: give a function (model, batch) -> loss, and a list",
        "gradient_accumulation_steps=2",
    ]
    for error, part in zip(errors, expected, strict=True):
        assert part in error


def hugging_face(name: str, precision: str | None) -> float:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    def make() -> nn.Module:
        torch.manual_seed(0)
        if name == "llama":
            return LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
                )
            )
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32, **dropout))
        if name == "gpt2_checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    data = list(torch.randint(0, 64, (MICRO_BATCHES, 2, 16)))
    return both(make, data, lambda model, ids: model(input_ids=ids, labels=ids).loss, stage=3, precision=precision)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt2_checkpointed"])
def test_hugging_face_models(ranks: Any, name: str, precision: str | None) -> None:
    """GPT-2's tied embedding adds up in another order: two units in the last place of weights near 1."""
    (difference,) = ranks(1, hugging_face, name, precision)
    assert difference <= (0.0 if name == "llama" else 2**-22 if precision is None else 5e-3)


class Counting(nn.Module):
    """A block whose forward changes its buffers and computes with one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        normed: Tensor = self.norm(x + self.inner(x))
        return normed * self.calls


def test_buffers_are_those_of_the_loop(ranks: Any) -> None:
    assert max(ranks(1, buffers_that_change)) == 0.0


def buffers_that_change() -> float:
    found = []
    for way in (ordinary, accumulate):
        torch.manual_seed(0)
        model = nn.Sequential(Counting(), Counting(), nn.Linear(8, 1))
        data = [(torch.randn(4, 8),) for _ in range(MICRO_BATCHES)]
        seen = train(way, model, data, lambda model, batch: model(*batch).square().mean(), stage=3, units=Counting)
        found.append([*seen, *(buffer.double() for buffer in model.buffers())])
    return largest_difference(*found)


class ChecksItself(nn.Module):
    """As Hugging Face's layers: the checkpoint is in their own __call__, around the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.runs = 0

    def __call__(self, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(super().__call__, x, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + torch.tanh(self.inner(x))


def test_a_block_that_checkpoints_itself_is_computed_twice(ranks: Any) -> None:
    assert ranks(1, checkpoints_of_its_own) == [[2 * MICRO_BATCHES] * 2]


def checkpoints_of_its_own() -> list[int]:
    model = nn.Sequential(ChecksItself(), ChecksItself(), nn.Linear(8, 1))
    zf.shard(model, stage=3, units=ChecksItself)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulate(model, lambda model, x: model(x).square().mean(), list(torch.randn(MICRO_BATCHES, 4, 8)))
    runs = [block.runs for block in model if isinstance(block, ChecksItself)]
    zf.close(model)
    return runs
