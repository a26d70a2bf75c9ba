"""Rows beside the four stages: parameters with owners, one rank that updates, groups. Weights and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import batches, largest_difference, make_model, train_ddp, train_zerofold
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofold as zf
from zerofold.bench.wire import count_elements
from zerofold.engine import Engine

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def groups(shape: tuple[int, int]) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("across", "inside"))}


def against_ddp(optimizer: str, row: Any, cut: str | None, shape: tuple[int, int] | None, **settings: Any) -> float:
    shared = {k: settings[k] for k in ("accumulate", "clip", "model_options") if k in settings}
    weights, _ = train_ddp(OPTIMIZERS[optimizer], 5, **shared)
    mesh = groups(shape) if shape else {}
    ours, _ = train_zerofold(OPTIMIZERS[optimizer], 5, stage=row, cut=cut, **mesh, **settings)
    return largest_difference(weights, ours)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("row", "cut"), [("dp", None), (1, "whole"), (2, "whole"), (3, "whole")])
def test_owners_update_as_one_process_would(ranks: Any, row: Any, cut: str | None, optimizer: str) -> None:
    """To the bit, fused kernels and optimizers that need whole matrices included: an owner has the whole parameter."""
    assert ranks(2, against_ddp, optimizer, row, cut, None) == [0.0, 0.0]
    without_noise = {"key_bias": False}  # whose gradient is rounding noise that Adafactor scales up
    assert max(ranks(3, against_ddp, optimizer, row, cut, None, model_options=without_noise)) <= 1e-6


@pytest.mark.parametrize(
    ("row", "shape"),
    [("hsdp", (2, 2)), ("hsdp", (4, 1)), ("hsdp", (1, 4)), ("hpz", (2, 2)), ("hpz", (4, 1)), (3, (2, 2)), (2, (2, 2))],
)
def test_groups_give_what_ddp_gives(ranks: Any, row: Any, shape: tuple[int, int]) -> None:
    assert max(ranks(4, against_ddp, "adamw", row, None, shape)) <= 1e-6


@pytest.mark.parametrize("row", ["hsdp", "hpz"])
@pytest.mark.parametrize("settings", [{"use_no_sync": True}, {"use_no_sync": False}, {"clip": 0.05}])
def test_groups_accumulate_and_clip(ranks: Any, row: str, settings: dict[str, Any]) -> None:
    assert max(ranks(4, against_ddp, "adamw", row, None, (2, 2), accumulate=3, **settings)) <= 1e-6


class Twice(nn.Module):
    """A reentrant checkpoint reduces a block's gradients in each of its calls; the second must wait for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(1500, 1500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True))
        return x


def reduced_twice(row: str) -> float:
    """The largest difference from stage 0, as a part of the largest gradient, over a few backwards."""

    def gradients(stage: Any, **settings: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = zf.shard(Twice(), stage=stage, units=nn.Linear, **settings)
        found = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(4, 1500, generator=generator).requires_grad_()
            model(x).pow(2).mean().backward()
            found += [gradient for p in model.parameters() if (gradient := zf.full_grad(p)) is not None]
            model.zero_grad()
        zf.close(model)
        return found

    expected = gradients(0)
    return largest_difference(expected, gradients(row, **groups((2, 1)))) / max(g.abs().max().item() for g in expected)


@pytest.mark.parametrize("row", ["hsdp", "hpz"])
def test_a_block_reduced_twice_in_one_backward(ranks: Any, row: str) -> None:
    assert max(ranks(2, reduced_twice, row)) <= 1e-5


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number == skip else torch.tanh(block(x))
        return x


def uneven_micro_batches(row: str) -> float:
    """A unit that only some micro-batches of a step use, not the last one."""

    def train(stage: Any, **settings: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Alternating()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        zf.prepare(model, optimizer, stage=stage, accumulate=3, **settings)
        for step in range(3):
            for skip in (2, 0, 1):
                x = torch.randn(
                    4, 16, generator=torch.Generator().manual_seed(100 * step + 10 * skip + dist.get_rank())
                )
                model(x, skip).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        zf.close(model)
        return [p.detach() for p in model.parameters()]

    return largest_difference(train(0), train(row, **groups((2, 2))))


@pytest.mark.parametrize("row", ["hsdp", "hpz"])
def test_a_unit_that_the_last_micro_batch_does_not_use(ranks: Any, row: str) -> None:
    assert max(ranks(4, uneven_micro_batches, row)) <= 1e-6


class LooksTwice(torch.optim.SGD):
    """Evaluates its closure, moves, and evaluates it again before the step that counts, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = lambda: None) -> Any:
        with torch.enable_grad():
            closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in held:
            p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            loss = closure()
        for p in held:
            p.add_(p.grad, alpha=-0.15)
        return loss


def closures(row: Any, cut: str | None) -> float:
    def train(model: Any, optimizer: Any) -> None:
        for batch in batches(3):

            def closure(batch: Any = batch) -> Any:
                optimizer.zero_grad()
                loss = model(*batch)
                loss.backward()
                return loss

            optimizer.step(closure)

    reference = make_model()
    wrapped = nn.parallel.DistributedDataParallel(reference)
    train(wrapped, LooksTwice(reference.parameters(), lr=0.1))
    model = make_model()
    zf.prepare(model, optimizer := LooksTwice(model.parameters(), lr=0.1), stage=row, cut=cut)
    train(model, optimizer)
    zf.close(model)
    return largest_difference(list(reference.parameters()), list(model.parameters()))


@pytest.mark.parametrize(("row", "cut"), [("dp", None), (1, "even"), (2, "whole"), (3, "even"), (3, "whole")])
def test_a_step_that_evaluates_its_closure_twice(ranks: Any, row: Any, cut: str | None) -> None:
    assert max(ranks(2, closures, row, cut)) <= 1e-6


class Muons(nn.Module):
    """Matrices alone, which is what Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def muon(row: Any, cut: str | None) -> tuple[float, float]:
    def train(model: Any, step_model: Any, optimizer: Any) -> None:
        for number in range(4):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
            step_model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    reference = Muons()
    wrapped = nn.parallel.DistributedDataParallel(reference)
    train(reference, wrapped, torch.optim.Muon(reference.parameters(), lr=1e-2))
    torch.manual_seed(0)
    model = Muons()
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)
    zf.prepare(model, optimizer, stage=row, cut=cut)
    with count_elements() as wire:
        train(model, model, optimizer)
    zf.close(model)
    psi = sum(p.numel() for p in model.parameters())
    return largest_difference(list(reference.parameters()), list(model.parameters())), wire.elements / psi / 4


@pytest.mark.parametrize(("row", "cut"), [("dp", None), (1, "whole"), (2, "whole"), (3, "whole")])
def test_muon_needs_no_traffic_of_its_own(ranks: Any, row: Any, cut: str | None) -> None:
    found = ranks(2, muon, row, cut)
    assert [difference for difference, _ in found] == [0.0, 0.0]
    assert sum(sent for _, sent in found) / 2 <= (1.5 if row == 3 else 1.0) * 1.05


def sent(row: Any, cut: str | None, shape: tuple[int, int] | None, accumulate: int) -> dict[str, float]:
    """Per step after the first, in parameters: counted from outside, and by group; with the least live bytes."""
    model = make_model(width=64, layers=6)
    psi = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.blocks[0].parameters())
    root = psi - 6 * block
    settings = groups(shape) if shape else {}
    if row in (3, "hsdp", "hpz"):
        settings["live_bytes"] = 4 * (root + block) + 4 * 64 * 40  # with padding: no block but the last one is kept
    zf.prepare(
        model, optimizer := torch.optim.AdamW(model.parameters()), stage=row, cut=cut, accumulate=accumulate, **settings
    )
    data = list(batches(3 * accumulate))

    def step(number: int) -> None:
        for batch in data[number * accumulate : (number + 1) * accumulate]:
            model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    before = zf.ledger(model).snapshot()
    with count_elements() as wire:
        step(1)
        step(2)
    after = zf.ledger(model).snapshot()
    zf.close(model)
    by_group = {
        group: (sent - before["comm_bytes_by_group"].get(group, 0)) / 4 / 2 / psi
        for group, sent in after["comm_bytes_by_group"].items()
        if group != "control"
    }
    total = torch.tensor(wire.elements)
    dist.all_reduce(total)  # what a rank sends on average
    return {**by_group, "outside": total.item() / dist.get_world_size() / 2 / psi, "kept": (root + block) / psi}


def mean(found: list[dict[str, float]], key: str) -> float:
    return sum(each.get(key, 0.0) for each in found) / len(found)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("row", "cut"), [("dp", None), (1, "whole"), (2, "whole"), (3, "whole"), (3, "even")])
def test_owners_send_what_the_formula_says(ranks: Any, world: int, row: Any, cut: str | None) -> None:
    found = ranks(world, sent, row, cut, None, 1)
    times = 3 - found[0]["kept"] if row == 3 else 2
    assert mean(found, "all") == pytest.approx(times * (world - 1) / world, rel=0.01)
    assert mean(found, "outside") == pytest.approx(mean(found, "all"), rel=0.01)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_hsdp_sends_across_groups_once_a_step(ranks: Any, micro_batches: int) -> None:
    """Inside a group of G as stage 3 does, each micro-batch; across R groups an all-reduce of a shard, Ψ/G, once."""
    found = ranks(4, sent, "hsdp", None, (2, 2), micro_batches)
    kept = found[0]["kept"]
    assert mean(found, "inside") == pytest.approx(micro_batches * (3 - kept) * 1 / 2, rel=0.01)
    assert mean(found, "across") == pytest.approx(2 * (1 / 2) * (1 / 2), rel=0.01)
    assert mean(found, "outside") == pytest.approx(mean(found, "inside") + mean(found, "across"), rel=0.01)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_hpz_gathers_over_all_ranks_once_a_step(ranks: Any, micro_batches: int) -> None:
    """The first gather and the reductions over all N; every further gather inside the group of G."""
    found = ranks(4, sent, "hpz", None, (2, 2), micro_batches)
    kept = found[0]["kept"]
    assert mean(found, "all") == pytest.approx((1 + micro_batches) * 3 / 4, rel=0.01)
    gathers = micro_batches * (2 - kept) - 1
    assert mean(found, "inside") == pytest.approx(gathers * 1 / 2, rel=0.01)
    assert mean(found, "outside") == pytest.approx(mean(found, "all") + mean(found, "inside"), rel=0.01)


def held(row: Any, cut: str | None, shape: tuple[int, int] | None) -> dict[str, float]:
    """Bytes per parameter between backward and step; those of the optimizer after it."""
    model = make_model(width=64, layers=4)
    settings = groups(shape) if shape else {}
    zf.prepare(model, optimizer := torch.optim.AdamW(model.parameters()), stage=row, cut=cut, **settings)
    for batch in batches(2):
        optimizer.zero_grad()
        model(*batch).backward()
        snapshot = zf.ledger(model).snapshot()
        optimizer.step()
    optimizer_bytes = zf.ledger(model).snapshot()["state_bytes"]["optimizer"]
    zf.close(model)
    psi = snapshot["psi"]
    return {state: n / psi for state, n in {**snapshot["state_bytes"], "optimizer": optimizer_bytes}.items()}


@pytest.mark.parametrize(("row", "cuts"), [(1, (1, 4, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))])
def test_owners_hold_an_even_share(ranks: Any, row: int, cuts: tuple[int, int, int]) -> None:
    for found in ranks(4, held, row, "whole", None):
        for (state, whole), parts in zip({"parameters": 4, "gradients": 4, "optimizer": 8}.items(), cuts, strict=True):
            # At stage 1 the local sums are gone by now, reduced to their owners. Whole parameters do not divide as
            # evenly as ranges: the largest is 7% of this model.
            assert found[state] == pytest.approx(whole / parts, rel=0.1 if parts > 1 else 0.03), state


def test_one_rank_alone_holds_the_optimizer_of_dp(ranks: Any) -> None:
    found = ranks(3, held, "dp", None, None)
    assert found[0]["optimizer"] == pytest.approx(8, rel=0.01)
    assert [each["optimizer"] for each in found[1:]] == [0, 0]


def test_groups_hold_what_the_formula_says(ranks: Any) -> None:
    for found in ranks(4, held, "hsdp", None, (2, 2)):
        assert found == pytest.approx({"parameters": 4 / 2, "gradients": 4 / 2, "optimizer": 8 / 2}, rel=0.03)
    for found in ranks(4, held, "hpz", None, (2, 2)):
        assert found == pytest.approx({"parameters": 4 / 4 + 4 / 2, "gradients": 1, "optimizer": 2}, rel=0.03)


class Costly(torch.optim.SGD):
    def update_cost(self, parameter: torch.Tensor) -> float:
        return 100.0 if parameter.shape == (96, 64) else 1.0


def owners_by_cost(as_argument: bool) -> list[int]:
    model = make_model(width=64)
    if as_argument:
        cost = Costly(model.parameters(), lr=0.1).update_cost
        zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, cut="whole", cost=cost)
    else:
        zf.prepare(model, Costly(model.parameters(), lr=0.1), stage=2, cut="whole")
    slabs = Engine.of(model).slabs()
    found = [e.owner for slab in slabs for e in slab.entries if e.parameter.shape == (96, 64)]
    zf.close(model)
    return found


@pytest.mark.parametrize("as_argument", [True, False])
def test_owners_are_balanced_by_the_cost_that_is_given(ranks: Any, as_argument: bool) -> None:
    for owners in ranks(2, owners_by_cost, as_argument):
        assert sorted(owners) == [0, 1]  # the two costly ones apart, whatever their bytes


def on_a_part_of_the_ranks() -> float:
    """Two jobs of two ranks each, side by side, each sharding over its own row of the mesh; twice in a row."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "data"))["data"]
    model = make_model()
    for _ in range(2):
        zf.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), stage=3, mesh=mesh)
        for batch in batches(2):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        zf.close(model)
    return sum(p.double().sum().item() for p in model.parameters())


def test_a_mesh_over_a_part_of_the_ranks_can_be_used_again(ranks: Any) -> None:
    first, second, third, fourth = ranks(4, on_a_part_of_the_ranks)
    assert first == second != third == fourth
