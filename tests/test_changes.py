"""What users do to a model after it was sharded: taken in where it makes sense, refused with the fix elsewhere."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from tests.models import largest_difference
from tests.ranks import raised
from tests.test_unusual import WIDTH, Averaging, Net, inputs, plain_step
from torch import Tensor, nn
from torch.nn.utils import parametrize

import zerofold as zf

ROWS = [("dp", None), (0, None), (2, None), (3, None), (3, "whole")]

Change = Callable[[Any, Any], None]


def follows(row: tuple[Any, Any], change: Change) -> float:
    """Two steps, the change, three more; the largest difference from a plain model that goes through the same."""

    def train(model: Any, optimizer: Any, plain: torch.optim.Optimizer) -> list[Tensor]:
        for step in range(5):
            if step == 2:
                change(model, plain)
            plain_step(model, optimizer, step)
        return [zf.full(p).cpu() for p in model.parameters()]

    def build() -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = Net()
        model.layers[1].requires_grad_(False)
        model.inlet.bias.requires_grad_(False)
        trainable = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trainable, lr=1e-2, eps=1e-4, weight_decay=0.1)

    reference, plain = build()
    expected = train(reference, Averaging(plain), plain)
    model, optimizer = build()
    zf.prepare(model, optimizer, stage=row[0], cut=row[1])
    found = train(model, optimizer, optimizer)
    assert [p.shape for p in found] == [p.shape for p in expected]
    zf.close(model)
    return largest_difference(expected, found)


def thaw(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.layers[1].requires_grad_(True)  # all of a unit
    model.inlet.bias.requires_grad_(True)  # one parameter beside others
    optimizer.add_param_group({"params": [*model.layers[1].parameters(), model.inlet.bias], "lr": 2e-2})


def thaw_after_a_look(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """At stage 3 the root is still gathered after a forward that nobody ran backward through."""
    model(inputs(90))
    thaw(model, optimizer)


def attach_a_module(model: Net, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(2)
    model.layers.append(type(model.layers[0])())
    model.layers[0].extra = nn.Linear(WIDTH, WIDTH)
    model.layers[0].register_forward_hook(_add_extra)
    optimizer.add_param_group({"params": [*model.layers[-1].parameters(), *model.layers[0].extra.parameters()]})


def _add_extra(module: Any, args: Any, output: Tensor) -> Tensor:
    return output + module.extra(output)


def wrap_a_layer(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """As adapters do: the layer moves one level down and new parameters stand beside it."""
    torch.manual_seed(2)
    adapted = Adapted(model.layers[2].a)
    model.layers[2].a = adapted
    optimizer.add_param_group({"params": [*adapted.down.parameters(), *adapted.up.parameters()]})


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def remove_a_layer(model: Net, optimizer: torch.optim.Optimizer) -> None:
    del model.layers[3]


@pytest.mark.parametrize("change", [thaw, thaw_after_a_look, attach_a_module, wrap_a_layer, remove_a_layer])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_changes_are_taken_in(ranks: Any, row: tuple[Any, Any], change: Change) -> None:
    assert max(ranks(2, follows, row, change)) <= 1e-6


def held_and_thawed(row: tuple[Any, Any], has_state: bool) -> float:
    """The optimizer holds the frozen parameters from the start, with state of an earlier training or without."""

    def train(wrap: Any, prepare: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=False)
        if has_state:
            plain_step(model, Averaging(optimizer), 50)
        model.layers[1].requires_grad_(False)
        model.inlet.bias.requires_grad_(False)
        if prepare:
            zf.prepare(model, optimizer, stage=row[0], cut=row[1])
        for step in range(4):
            if step == 2:
                model.layers[1].a.requires_grad_(True)
                model.inlet.bias.requires_grad_(True)
            plain_step(model, wrap(optimizer), step)
        return [zf.full(p) for p in model.parameters()]

    return largest_difference(train(Averaging, False), train(lambda optimizer: optimizer, True))


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_optimizer_that_held_frozen_parameters_trains_them_once_thawed(
    ranks: Any, row: tuple[Any, Any], has_state: bool
) -> None:
    assert max(ranks(2, held_and_thawed, row, has_state)) <= 1e-6


def thawed_in(dtype: torch.dtype, precision: zf.Precision | None) -> None:
    """An optimizer is tried anew when it gets more to train, with states of this dtype by then."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    model[0].requires_grad_(False)
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=2, precision=precision)
    for step in range(2):
        model[0].requires_grad_(step > 0)
        model(torch.ones(2, 8, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer.state) == 4
    zf.close(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_thawing_with_states_that_are_not_fp32(ranks: Any, dtype: torch.dtype) -> None:
    ranks(1, thawed_in, dtype, None)


def test_thawing_with_moments_of_16_bits(ranks: Any) -> None:
    ranks(1, thawed_in, torch.float32, zf.Precision(parameters=torch.bfloat16, moments=torch.bfloat16))


def adapters_after_sharding(stage: int) -> tuple[float, set[str]]:
    from peft import LoraConfig, get_peft_model

    def build() -> Net:
        torch.manual_seed(1)
        return Net()

    def train(model: Any, optimizer: Any) -> None:
        for step in range(3):
            plain_step(model, optimizer, step)

    config = LoraConfig(r=4, target_modules=["a"], init_lora_weights=False)
    reference = build()
    torch.manual_seed(3)
    reference = get_peft_model(reference, config)
    train(reference, Averaging(torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], eps=1e-4)))
    base = zf.shard(build(), stage=stage)
    torch.manual_seed(3)
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], eps=1e-4)
    zf.attach(base, optimizer)
    train(model, optimizer)
    zf.close(base)
    trained = {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad}
    return largest_difference(list(reference.parameters()), list(model.parameters())), trained


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_put_in_after_sharding(ranks: Any, stage: int) -> None:
    for difference, trained in ranks(2, adapters_after_sharding, stage):
        assert difference <= 1e-6
        assert trained == {"lora_A", "lora_B"}


def functional(stage: int) -> tuple[float, float]:
    torch.manual_seed(1)
    model = Net()
    given = {"outlet.weight": torch.zeros(WIDTH, WIDTH), "layers.1.a.bias": torch.ones(WIDTH)}
    expected = torch.func.functional_call(model, given, inputs(0))
    plain = model(inputs(0))
    zf.shard(model, stage=stage)
    called = torch.func.functional_call(model, given, inputs(0))
    return (called - expected).abs().max().item(), (model(inputs(0)) - plain).abs().max().item()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_functional_calls(ranks: Any, stage: int) -> None:
    assert ranks(2, functional, stage) == [(0.0, 0.0)] * 2


class WithMethods(Net):
    def encode(self, x: Tensor) -> Tensor:
        return self.layers[1](self.inlet(x))

    def score(self, x: Tensor) -> Tensor:
        return self.outlet(self.layers[0].a(self.encode(x)))


def method_step(model: Any, optimizer: Any, step: int) -> None:
    with torch.no_grad():
        seen = model.encode(inputs(step))
    (model.score(inputs(step)) + seen).pow(2).mean().backward()
    if step % 2:
        model(inputs(step + 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def methods(row: tuple[Any, Any]) -> float:
    def train(model: Any, optimizer: Any) -> list[Tensor]:
        for step in range(4):
            method_step(model, optimizer, step)
        return [zf.full(p) for p in model.parameters()]

    torch.manual_seed(1)
    reference = WithMethods()
    expected = train(reference, Averaging(torch.optim.AdamW(reference.parameters(), eps=1e-4)))
    torch.manual_seed(1)
    model = WithMethods()
    zf.prepare(model, optimizer := torch.optim.AdamW(model.parameters(), eps=1e-4), stage=row[0], cut=row[1])
    found = train(model, optimizer)
    zf.close(model)
    return largest_difference(expected, found)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_methods_other_than_forward(ranks: Any, row: tuple[Any, Any]) -> None:
    assert max(ranks(2, methods, row)) <= 1e-6


def fails_inside(stale: bool) -> float:
    """A call of an inner module raises and is caught; later ones must not find what it had gathered."""
    torch.manual_seed(1)
    model = WithMethods()
    zf.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.inlet(torch.ones(2, 3))
    model(inputs(0)).sum().backward()
    optimizer.step()
    if stale:
        model(inputs(1))
        optimizer.step()
    with torch.no_grad():
        found = model.inlet(inputs(2))
        expected = torch.nn.functional.linear(inputs(2), zf.full(model.inlet.weight), zf.full(model.inlet.bias))
    zf.close(model)
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("stale", [False, True])
def test_an_inner_call_that_raised_leaves_nothing_behind(ranks: Any, stale: bool) -> None:
    assert max(ranks(2, fails_inside, stale)) <= 1e-6


def misuse(what: str, stage: int) -> None:
    torch.manual_seed(1)
    model = Net()
    zf.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    plain_step(model, optimizer, 0)
    if what == "cast":
        model.half()
    elif what == "part cast":
        model.layers[2].double()
    elif what == "given other data":
        with zf.full_params(model):
            model.outlet.weight.data = torch.ones(WIDTH, WIDTH)
    elif what == "replaced":
        model.outlet.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    elif what == "tied":
        model.outlet.weight = model.inlet.weight
    elif what == "parametrized":
        with zf.full_params(model):
            parametrize.register_parametrization(model.outlet, "weight", nn.Identity())
    elif what == "deep copy":
        copy.deepcopy(model)
    elif what == "deep copy of a unit":
        copy.deepcopy(model.layers[1])
    elif what == "pickle":
        torch.save(model, io.BytesIO())
    elif what == "foreign group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
    elif what == "used outside":
        model.outlet.weight @ torch.ones(WIDTH)
    elif what == "pickled state":
        torch.save(model.state_dict(), io.BytesIO())
    elif what == "written":
        safetensors.torch.save(model.state_dict())
    elif what == "attached elsewhere":
        model.layers[1].extra = nn.Linear(2, 2, device="meta")
    elif what == "another rank":
        with zf.full_params(model, from_rank=7):
            pass
    elif what == "different on ranks":
        model.extra = nn.Linear(2, 2 + dist.get_rank())
    plain_step(model, optimizer, 1)


MISUSES = {
    "cast": ("'inlet.weight'", "before zerofold sees the model"),
    "part cast": ("'layers.2.a.weight'", "before zerofold sees the model"),
    "given other data": ("'outlet.weight' was moved, cast or given other data", "after zf.close(model)"),
    "replaced": ("'outlet.weight' was replaced", "zf.full_params(model)"),
    "tied": ("'outlet.weight' was replaced", "zf.close(model)"),
    "deep copy": ("cannot be deep-copied", "copy the model before zerofold sees it"),
    "deep copy of a unit": ("cannot be deep-copied", "second.load_state_dict(model.state_dict())"),
    "pickle": ("cannot be pickled", "zf.full_params(model)"),
    "foreign group": ("of shape (7,) is not one of the model's", "build the optimizer from this model's parameters"),
    "attached elsewhere": ("'layers.1.extra.weight' was attached", "move the new module there first"),
    "another rank": ("from_rank=7 is no rank of this model", "0 to 1"),
    "different on ranks": ("different models", "'extra.weight"),
}
OF_CUT_PARAMETERS = {
    "used outside": ("'outlet.weight'", "zf.full(p)"),
    "pickled state": ("cannot be pickled", "save model.state_dict()"),
    "written": ("'inlet.weight' is cut over ranks", "zf.export(model, folder)"),
}


@pytest.mark.parametrize("what", MISUSES)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_misuse_is_named_with_its_fix(ranks: Any, what: str, stage: int) -> None:
    for error in ranks(2, raised, misuse, what, stage):
        assert all(part in error for part in MISUSES[what]), error
        assert "\n" not in error


@pytest.mark.parametrize("what", OF_CUT_PARAMETERS)
def test_misuse_of_cut_parameters_is_named_with_its_fix(ranks: Any, what: str) -> None:
    for error in ranks(2, raised, misuse, what, 3):
        assert all(part in error for part in OF_CUT_PARAMETERS[what]), error


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parametrization_registered_later(ranks: Any, stage: int) -> None:
    ranks(2, misuse, "parametrized", stage)


def harmless(stage: int) -> None:
    torch.manual_seed(1)
    model = Net()
    zf.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    plain_step(model, optimizer, 0)
    model.to("cpu")
    model.float()
    model.train(False).train()
    model.requires_grad_(True)
    with zf.full_params(model):
        state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    plain_step(model, optimizer, 1)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_changes_nothing_is_let_pass(ranks: Any, stage: int) -> None:
    ranks(2, harmless, stage)
