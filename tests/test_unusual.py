"""Programs that are legal in torch and easy to get wrong here, against a plain model with averaged gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import largest_difference
from tests.ranks import raised
from torch import Tensor, nn

import zerofold as zf
from zerofold.engine import Engine

STAGES = (0, 1, 2, 3)
WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    layer: type[nn.Module] = Layer

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Any:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return self.outlet(x)


def inputs(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


Step = Callable[[nn.Module, Any, int], None]


def plain_step(model: nn.Module, optimizer: Any, step: int) -> None:
    model(inputs(step)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Averaging:
    """An optimizer for the reference that averages gradients over ranks first; a missing one counts as zero."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.zero_grad = optimizer, optimizer.zero_grad

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                has = torch.tensor(float(p.grad is not None))
                dist.all_reduce(has)
                if has:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad / dist.get_world_size()
                    dist.all_reduce(p.grad)
        self.optimizer.step()


def difference(kind: type[nn.Module], stage: int, step: Step = plain_step, steps: int = 3) -> float:
    torch.manual_seed(1)
    reference = kind()
    torch.manual_seed(1)
    model = kind()
    averaging = Averaging(torch.optim.Adam(reference.parameters(), lr=1e-2, eps=1e-4))
    _, optimizer = zf.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4), stage=stage)
    for number in range(steps):
        step(reference, averaging, number)
        step(model, optimizer, number)
    zf.close(model)
    return largest_difference([p.detach() for p in reference.parameters()], [p.detach() for p in model.parameters()])


def check(ranks: Any, kind: type[nn.Module], stage: int, step: Step = plain_step, steps: int = 3) -> None:
    assert max(ranks(2, difference, kind, stage, step, steps)) <= 1e-6


class SkipsByRank(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for number, layer in enumerate(self.layers):
            if not (number == 1 and dist.get_rank() == 0):
                x = layer(x)
        return self.outlet(x)


class NeverUsesOne(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(self.layers[2](self.layers[0](self.inlet(x))))


class UsesTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.outlet(x)


class LayerWithAuxiliaryLoss(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.auxiliary = self.a(y).pow(2).mean()  # left on the module, as mixture-of-experts layers do
        return y


class AuxiliaryLosses(Net):
    layer = LayerWithAuxiliaryLoss

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + sum(layer.auxiliary for layer in self.layers)


class Result:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class LayerReturningAnObject(Layer):
    def forward(self, x: Any) -> Any:
        return Result(super().forward(x.value))


class Objects(Net):
    layer = LayerReturningAnObject

    def forward(self, x: Tensor) -> Tensor:
        held = Result(self.inlet(x))
        for layer in self.layers:
            held = layer(held)
        return self.outlet(held.value)


class CallsItself(Net):
    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        return self(super().forward(x), again=False) if again else super().forward(x)


class GradientInsideForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.inlet(x))
        (force,) = torch.autograd.grad(self.layers[1](x).sum(), x)
        return self.outlet(self.layers[2](x) + force)


class Scalar(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


MODELS = [UsesTwice, NeverUsesOne, AuxiliaryLosses, Objects, CallsItself, GradientInsideForward, Scalar]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_unusual_models(ranks: Any, kind: type[nn.Module], stage: int) -> None:
    check(ranks, kind, stage)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_unit_that_one_rank_does_not_use(ranks: Any, stage: int) -> None:
    check(ranks, SkipsByRank, stage, steps=5)


def clear_between(model: nn.Module, optimizer: Any, step: int) -> None:
    loss = model(inputs(step)).pow(2).mean()
    model.zero_grad()
    loss.backward()
    optimizer.step()


def two_losses(model: nn.Module, optimizer: Any, step: int) -> None:
    first, second = model(inputs(step)).pow(2).mean(), model(inputs(step + 50)).abs().mean()
    first.backward()
    second.backward()
    optimizer.step()
    optimizer.zero_grad()


def retained(model: nn.Module, optimizer: Any, step: int) -> None:
    loss = model(inputs(step)).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def penalty(model: nn.Module, optimizer: Any, step: int) -> None:
    x = inputs(step).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Broken(RuntimeError):
    pass


def raises_in_backward(model: nn.Module, optimizer: Any, step: int) -> None:
    def fail(_: Tensor) -> None:
        raise Broken

    hidden = inputs(step).requires_grad_() * 1.0
    hidden.register_hook(fail)  # runs last, when all of the model's gradients are there
    with pytest.raises(Broken):
        model(hidden).pow(2).mean().backward()
    optimizer.zero_grad()
    plain_step(model, optimizer, step)


def frozen_for_a_while(model: nn.Module, optimizer: Any, step: int) -> None:
    for p in model.layers[1].parameters():  # type: ignore[index,union-attr]
        p.requires_grad_(step != 1)
    plain_step(model, optimizer, step)


def step_inside_full_params(model: nn.Module, optimizer: Any, step: int) -> None:
    model(inputs(step)).pow(2).mean().backward()
    if isinstance(optimizer, Averaging):
        optimizer.step()
    else:
        with zf.full_params(model), zf.full_params(model):
            optimizer.step()
    optimizer.zero_grad()


STEPS = [clear_between, two_losses, retained, penalty, raises_in_backward, frozen_for_a_while, step_inside_full_params]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("stage", STAGES)
def test_unusual_steps(ranks: Any, stage: int, step: Step) -> None:
    check(ranks, Net, stage, step)


class ReturnsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Weight(), Weight()])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers[0]() + self.layers[1]()


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, WIDTH))

    def forward(self) -> Tensor:
        return self.weight[:4]


def run_weights() -> None:
    zf.shard(ReturnsItsWeight(), stage=3)(inputs(0))


def test_a_view_of_a_released_weight_is_refused(ranks: Any) -> None:
    for error in ranks(2, raised, run_weights):
        assert "returns a view of a parameter of shape (4, 32)" in error
        assert "return a clone" in error


def stale_graph(stage: int) -> None:
    model, optimizer = zf.prepare(model := Net(), torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    loss = model(inputs(0)).pow(2).mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    model(inputs(1))
    loss.backward()


@pytest.mark.parametrize("stage", STAGES)
def test_backward_through_weights_that_a_step_has_changed_is_refused(ranks: Any, stage: int) -> None:
    for error in ranks(2, raised, stale_graph, stage):
        assert "modified by an inplace operation" in error


class Decoder(Net):
    """Every layer also reads what the first one made, which backward reaches last."""

    def forward(self, x: Tensor) -> Tensor:
        memory = x = self.inlet(x)
        for layer in self.layers:
            x = layer(x + memory)
        return self.outlet(x)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        return self.outlet(x)


def peak_and_bound(kind: type[nn.Module]) -> tuple[int, int]:
    model, optimizer = zf.prepare(model := kind(8), torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    for step in range(3):
        plain_step(model, optimizer, step)
    schedule = Engine.of(model).schedule
    zf_peak = schedule.peak_live_bytes
    zf.close(model)
    return zf_peak, schedule.live_bytes


@pytest.mark.parametrize("kind", [Net, Decoder, Checkpointed])
def test_the_bound_on_gathered_bytes_holds_in_backward(ranks: Any, kind: type[nn.Module]) -> None:
    for peak, bound in ranks(2, peak_and_bound, kind):
        assert peak <= bound


def two_optimizers(stage: int) -> float:
    torch.manual_seed(1)
    model = Net()
    inner = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    outer = torch.optim.Adam([*model.inlet.parameters(), *model.outlet.parameters()], lr=1e-2)
    zf.attach(zf.shard(model, stage=stage), inner, outer)
    before = [zf.full(p) for p in model.parameters()]
    model(inputs(0)).pow(2).mean().backward()
    inner.step()
    outer.step()
    moved = [(zf.full(p) - b).abs().max().item() for p, b in zip(model.parameters(), before, strict=True)]
    zf.close(model)
    return min(moved)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_optimizers_share_a_model(ranks: Any, stage: int) -> None:
    assert min(ranks(2, two_optimizers, stage)) > 0


def taking_turns(stage: int, turns: str) -> tuple[list[int], int, float]:
    """Parameters fetched in each turn, the number that would be fetched once, and the difference from DDP.

    Of a turn, 'a' and 'b' are the steps of two optimizers, each with some of every layer; 'r' reads all weights.
    """

    def train(sharded: bool) -> tuple[list[torch.Tensor], list[int]]:
        torch.manual_seed(1)
        model, run = Net(), None
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        optimizers = {"a": torch.optim.SGD(weights, lr=0.1), "b": torch.optim.Adam(biases, lr=1e-2, eps=1e-4)}
        run = model if sharded else nn.parallel.DistributedDataParallel(model)
        if sharded:
            zf.attach(zf.shard(model, stage=stage), *optimizers.values())
        fetched = []
        for step, turn in enumerate(turns.split()):
            before = zf.ledger(model).snapshot()["comm_bytes"].get("all_gather", 0) if sharded else 0
            run(inputs(step)).pow(2).mean().backward()
            for action in turn:
                if action == "r":
                    assert all(bool(p.isfinite().all()) for p in model.parameters())
                else:
                    optimizers[action].step()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            if sharded:
                # A step whose guess was wrong is fetched by the forward of the next turn, and counted there.
                fetched.append(zf.ledger(model).snapshot()["comm_bytes"].get("all_gather", 0) - before)
        if sharded:
            zf.close(model)
        return [p.detach() for p in model.parameters()], fetched

    (expected, _), (found, fetched) = train(sharded=False), train(sharded=True)
    return fetched, sum(p.nbytes for p in found) // 2, largest_difference(expected, found)


@pytest.mark.parametrize("stage", [2])
@pytest.mark.parametrize(
    ("turns", "times"),
    [
        ("ab ab ab abr", [2, 1, 1, 1]),  # how many follow is known after the first
        ("ba ba ba", [2, 1, 1]),
        ("ar br ar br", [1, 1, 1, 1]),  # one in each turn, and read at once
        ("ab a ab b b", [2, 0, 1 + 2, 1, 1]),  # the second turn waits for 'b' in vain, the third forward fetches
    ],
)
def test_two_optimizers_fetch_parameters_once(ranks: Any, stage: int, turns: str, times: list[int]) -> None:
    for fetched, once, difference in ranks(2, taking_turns, stage, turns):
        assert difference <= 1e-6
        assert fetched == pytest.approx([count * once for count in times], rel=0.1, abs=1)


def read_between_two_steps() -> str:
    torch.manual_seed(1)
    model = Net()
    first = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    second = torch.optim.SGD([*model.inlet.parameters(), *model.outlet.parameters()], lr=0.1)
    zf.attach(zf.shard(model, stage=2), first, second)
    for step in range(2):
        model(inputs(step)).pow(2).mean().backward()
        first.step()
        if step == 1:
            message = raised(next(model.layers.parameters()).sum)
            with zf.full_params(model):
                assert next(model.layers.parameters()).isfinite().all()
        second.step()
    zf.close(model)
    return message


def test_old_numbers_are_not_read_between_two_optimizers(ranks: Any) -> None:
    for message in ranks(2, read_between_two_steps):
        assert "'layers.0." in message
        assert "after the step of the other" in message


def gathered_after_a_step() -> tuple[int, int]:
    model = Net()
    model.requires_grad_(False)
    model.outlet.requires_grad_(True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = zf.prepare(model, torch.optim.SGD(trainable, lr=0.1), stage=2)
    plain_step(model, optimizer, 0)
    before = zf.ledger(model).snapshot()["comm_bytes"]["all_gather"]
    plain_step(model, optimizer, 1)
    sent = zf.ledger(model).snapshot()["comm_bytes"]["all_gather"] - before
    zf.close(model)
    return sent, sum(p.nbytes for p in trainable) // 2


def test_frozen_parameters_are_not_fetched_again(ranks: Any) -> None:
    for sent, expected in ranks(2, gathered_after_a_step):
        assert sent <= expected + 128


class Interrupted(nn.Module):
    """Whose forward is interrupted once, as by Ctrl-C in a notebook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.is_next = nn.Linear(8, 8), nn.Linear(8, 8), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.is_next:
            self.is_next = False
            raise KeyboardInterrupt
        return self.second(x)


def interrupted(stage: int, precision: str | None) -> tuple[list[bool], int]:
    found, live = [], 0
    for where in (None, 0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(Interrupted(), Interrupted())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zf.prepare(model, optimizer, stage=stage, precision=precision, units=Interrupted)
        for step in range(3):
            if step == 1 and where is not None:
                model[where].is_next = True
                with pytest.raises(KeyboardInterrupt):
                    model(torch.ones(2, 8))
            model(torch.full((2, 8), float(step))).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        live = max(live, Engine.of(model).schedule.live)
        found.append([zf.full(p) for p in model.parameters()])
        zf.close(model)
    return [all(map(torch.equal, each, found[0])) for each in found], live


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_that_was_interrupted_leaves_the_model_usable(ranks: Any, stage: int, precision: str | None) -> None:
    assert ranks(1, interrupted, stage, precision) == [([True] * 3, 0)]
