"""Muon for the hidden matrices and AdamW for the rest, each parameter updated by its owner: weights, bytes, balance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import batches, largest_difference, make_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zerofold as zf
from zerofold.bench.gpt import GPT, GPTSize
from zerofold.bench.wire import count_elements
from zerofold.dealing import Cost, choose_owners
from zerofold.engine import Engine
from zerofold.optim.cost import newton_schulz_flops, update_cost
from zerofold.placement import row
from zerofold.units import assign, find_units

STAGES = (1, 2, 3)
STEPS = 20
MODEL: dict[str, Any] = {"width": 32, "layers": 2, "key_bias": False}


class ExactMuon(torch.optim.Muon):
    """Muon with Newton-Schulz in the precision of the parameters.

    torch's rounds gradients to bf16 first. Two that differ in the last bit of fp32, as those of one batch and of its
    halves do, may round apart, and then the updates differ by a hundredth of a step: without any sharding, the model
    of this file moves by 0.1 in 20 steps and ends 1e-3 apart.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            a, b, c = group["ns_coefficients"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(momentum, group["momentum"])
                x = x / x.norm()
                x = x.T if p.shape[0] > p.shape[1] else x
                for _ in range(group["ns_steps"]):
                    gram = x @ x.T
                    x = a * x + (b * gram + c * gram @ gram) @ x
                p.mul_(1 - group["lr"] * group["weight_decay"])
                x = x.T if p.shape[0] > p.shape[1] else x
                p.add_(x, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def two_optimizers(model: nn.Module, kind: type[torch.optim.Muon]) -> tuple[torch.optim.Optimizer, ...]:
    named = list(model.named_parameters())
    hidden = [p for name, p in named if name.startswith("blocks") and p.dim() == 2]
    others = [p for name, p in named if not (name.startswith("blocks") and p.dim() == 2)]
    return kind(hidden, lr=1e-2), torch.optim.AdamW(others, lr=1e-3, eps=1e-4)


def one_adafactor(model: nn.Module, _: Any = None) -> tuple[torch.optim.Optimizer, ...]:
    return (torch.optim.Adafactor(model.parameters(), lr=1e-2),)


def update(optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def one_process(make: Any, kind: Any, *, at_once: bool) -> list[Tensor]:
    """Trained on all ranks' data: in one batch, or rank by rank, gradients added up. The start comes first."""
    world = dist.get_world_size()
    model = make_model(**MODEL)
    optimizers = make(model, kind)
    for data in zip(*(batches(STEPS, rank=rank) for rank in range(world)), strict=True):
        if at_once:
            model(*(torch.cat(parts) for parts in zip(*data, strict=True))).backward()
        else:
            for batch in data:
                (model(*batch) / world).backward()
        update(optimizers)
    return [p.detach() for p in model.parameters()]


def sharded(make: Any, kind: Any, stage: int) -> list[Tensor]:
    model = make_model(**MODEL)
    optimizers = make(model, kind)
    zf.attach(zf.shard(model, stage=stage, cut="whole", cost=update_cost(optimizers[0])), *optimizers)
    for batch in batches(STEPS):
        model(*batch).backward()
        update(optimizers)
    zf.close(model)
    return [p.detach() for p in model.parameters()]


def against_one_process(make: Any, kind: Any, at_once: bool) -> dict[int, float]:
    """By stage: the largest difference of a weight from one process, as rank 0 has it."""
    expected = one_process(make, kind, at_once=at_once) if dist.get_rank() == 0 else []
    found = {stage: sharded(make, kind, stage) for stage in STAGES}
    return {stage: largest_difference(expected, each) for stage, each in found.items()} if expected else {}


@pytest.mark.parametrize("world", [2, 4])
def test_muon_and_adamw_give_the_weights_of_one_process(ranks: Any, world: int) -> None:
    """On the concatenated batch, in fp32 throughout."""
    differences = ranks(world, against_one_process, two_optimizers, ExactMuon, True)[0]
    assert differences == pytest.approx(dict.fromkeys(STAGES, 0.0), abs=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_torchs_muon_gives_the_bits_of_one_process(ranks: Any, world: int) -> None:
    """With the mean of the ranks' gradients, which rounding to bf16 then treats alike: see ExactMuon."""
    differences = ranks(world, against_one_process, two_optimizers, torch.optim.Muon, False)[0]
    assert differences == dict.fromkeys(STAGES, 0.0)


def test_adafactor_gives_the_weights_of_one_process(ranks: Any) -> None:
    assert ranks(2, against_one_process, one_adafactor, None, False)[0] == dict.fromkeys(STAGES, 0.0)
    at_once = ranks(2, against_one_process, one_adafactor, None, True)[0]
    assert at_once == pytest.approx(dict.fromkeys(STAGES, 0.0), abs=1e-5)


def adamw_alone(model: nn.Module, _: Any = None) -> tuple[torch.optim.Optimizer, ...]:
    return (torch.optim.AdamW(model.parameters(), lr=1e-3),)


def sent(make: Any, stage: int) -> tuple[int, float]:
    """Elements in two steps after the first, by the ledger and counted from outside."""
    model = make_model(**MODEL)
    optimizers = make(model, torch.optim.Muon)
    zf.attach(zf.shard(model, stage=stage, cut="whole"), *optimizers)
    first, *others = batches(3)
    model(*first).backward()
    update(optimizers)
    before = zf.ledger(model).snapshot()["comm_elements"]
    with count_elements() as wire:
        for batch in others:
            model(*batch).backward()
            update(optimizers)
    after = zf.ledger(model).snapshot()["comm_elements"]
    zf.close(model)
    return after - before, wire.elements


def sent_by_stage() -> dict[str, tuple[int, float]]:
    makers = {"muon+adamw": two_optimizers, "adamw": adamw_alone}
    return {f"stage {stage} {name}": sent(make, stage) for stage in STAGES for name, make in makers.items()}


def test_muon_sends_what_adamw_sends(ranks: Any) -> None:
    """On every rank. That parameters are fetched once, though two optimizers step, is known after the first step."""
    for rank, found in enumerate(ranks(2, sent_by_stage)):
        for stage in STAGES:
            assert found[f"stage {stage} muon+adamw"] == found[f"stage {stage} adamw"], f"rank {rank}: {found}"


@pytest.mark.parametrize("shape", [(96, 96), (64, 128), (160, 32)])
@pytest.mark.parametrize("iterations", [1, 5])
def test_the_cost_of_muon_is_what_torch_computes(shape: tuple[int, int], iterations: int) -> None:
    weight = nn.Parameter(torch.ones(shape))
    weight.grad = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon([weight], ns_steps=iterations).step()
    assert newton_schulz_flops(shape, iterations) == counter.get_total_flops()


def loads(model: nn.Module, world: int, by: Cost | None, measure: Cost) -> list[float]:
    """What each owner has of `measure` when parameters are dealt out by `by`."""
    assigned = assign(model, find_units(model, None))
    choose_owners(assigned, row(2, "whole"), world, by)
    entries = [entry for unit in assigned.values() for entry in unit]
    return [sum(measure(entry.parameter) for entry in entries if entry.owner == rank) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_owners_share_newton_schulz_evenly(world: int) -> None:
    """GPT-2 with an embedding and a head of 38.6M parameters each; by bytes, their owners have few matrices."""
    with torch.device("meta"):
        model = GPT(GPTSize(vocab=50257, width=768, layers=12, heads=12, seq=1024))
    muon, _ = two_optimizers(model, torch.optim.Muon)
    hidden = {id(p) for p in muon.param_groups[0]["params"]}
    cost = update_cost(muon)
    assert cost is not None

    def matrix_work(p: Tensor) -> float:
        return newton_schulz_flops(p.shape, 5) if id(p) in hidden else 0.0

    by_cost, by_bytes = loads(model, world, cost, matrix_work), loads(model, world, None, matrix_work)
    table = "\n".join(f"{a:.3g} flops by cost, {b:.3g} by bytes" for a, b in zip(by_cost, by_bytes, strict=True))
    mean = sum(by_cost) / world
    assert max(by_cost) <= 1.15 * mean, table  # the owner of an embedding has that to update as well
    assert world == 2 or max(by_bytes) >= 1.35 * mean, table
    everything = loads(model, world, cost, cost)
    assert max(everything) <= 1.05 * sum(everything) / world, everything


def owners_through_prepare(kind: str) -> list[int]:
    """Of a square matrix and two flat ones, all with as many bytes."""
    model = nn.ParameterList([torch.ones(64, 64), torch.ones(4, 1024), torch.ones(4, 1024)])
    zf.prepare(model, getattr(torch.optim, kind)(model.parameters()), stage=2, cut="whole")
    owners = {entry.name: entry.owner for slab in Engine.of(model).slabs() for entry in slab.entries}
    zf.close(model)
    return [owners[str(number)] for number in range(3)]


def test_prepare_knows_what_muon_costs(ranks: Any) -> None:
    assert ranks(2, owners_through_prepare, "AdamW") == [[0, 1, 0]] * 2
    assert ranks(2, owners_through_prepare, "Muon") == [[0, 1, 1]] * 2
