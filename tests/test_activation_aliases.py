"""What shares memory with a kept tensor, or changes it, gives the gradients of plain torch, or an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofold as zf

CHANGED = r"shape \(2, 8\) that is kept for backward.*changed in place"
WAYS: list[dict[str, Any]] = [{"keep": "host"}, {"keep": "host", "use_reentrant": True}, {"contiguous": True}]


def layers(count: int) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(count))


def given() -> Tensor:
    return torch.linspace(0, 1, 16).view(2, 8).requires_grad_()


@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("how", WAYS[:2])
def test_an_input_changed_in_place_is_noticed_by_backward(how: dict[str, Any], after: int) -> None:
    """However far it is on its way down; as with what autograd keeps, only a backward that wants it fails."""
    model = layers(2 + after)
    zf.checkpoint_blocks(model, **how)
    x = model[0](given())
    made = model[1](x)
    with torch.no_grad():
        x += 1
    for block in model[2:]:
        made = block(made)
    with pytest.raises(RuntimeError, match=CHANGED):
        made.sum().backward()


def test_an_input_that_has_left_the_device_may_change() -> None:
    def gradients(keeps: bool) -> list[Any]:
        model = layers(5)
        if keeps:
            zf.checkpoint_blocks(model, keep="host")
        x = made = model[0](given())
        for block in model[1:]:
            made = block(made)
        if keeps:
            with torch.no_grad():
                x += 1
        made.square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, gradients(False), gradients(True)))


class Doubling(nn.Linear):
    """Changes its own input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)
        return super().forward(x)


@pytest.mark.parametrize("how", WAYS)
def test_a_block_that_changes_its_own_input_is_noticed(how: dict[str, Any]) -> None:
    """Made again, it would change what is kept a second time."""
    model = nn.Sequential(Doubling(8, 8), Doubling(8, 8))
    zf.checkpoint_blocks(model, units=Doubling, **how)
    with pytest.raises(RuntimeError, match=CHANGED):
        model(given() * 1.0).sum().backward()


@pytest.mark.parametrize("change", [lambda x: x.mul_(3), lambda x: x.zero_()])
def test_an_activation_changed_in_place_is_noticed(change: Callable[[Tensor], Tensor]) -> None:
    (linear,) = layers(1)
    with zf.offload_activations(linear, above=0):
        y = given().exp()
        z = linear(y)
        change(y)
        with pytest.raises(RuntimeError, match=CHANGED):
            z.sum().backward()


def test_a_result_made_in_place_is_kept_as_it_is() -> None:
    def gradient(x: Tensor) -> Tensor:
        (x * 2).relu_().mul(3).exp_().sum().backward()
        assert x.grad is not None
        return x.grad

    with zf.offload_activations(above=0):
        found = gradient(given())
    assert torch.equal(found, gradient(given()))


@pytest.mark.parametrize("keep", ["host", "device"])
def test_a_conjugate_is_not_taken_for_its_twin(keep: str) -> None:
    def gradient(store: zf.CheckpointStore | None) -> Tensor:
        z = torch.tensor([1 + 2j, 3 - 1j]).requires_grad_()
        a = z * 1
        zf.checkpoint(lambda one, other: (one * one * other).real, a, a.conj(), store=store).sum().backward()
        assert z.grad is not None
        return z.grad

    assert torch.equal(gradient(None), gradient(zf.CheckpointStore(keep)))


@pytest.mark.parametrize("keep", ["host", "device"])
def test_inputs_that_share_memory_keep_their_own_graphs(keep: str) -> None:
    def gradient(store: zf.CheckpointStore | None) -> Tensor:
        x = torch.linspace(0, 1, 4).requires_grad_()
        a = x * 2

        def product(one: Tensor, two: Tensor, three: list[Tensor], *, four: Tensor, none: None) -> tuple[Any, ...]:
            return one, none, [one * two.flatten() * three[0] * four]

        same, none, (made,) = zf.checkpoint(product, a, a.view(2, 2), [a.detach()], four=a, none=None, store=store)
        assert none is None
        (same.sum() + made.sum()).backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(None), gradient(zf.CheckpointStore(keep)))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_sparse_input_stays_where_it_is(requires_grad: bool) -> None:
    sparse, x = torch.eye(4).to_sparse().requires_grad_(requires_grad), torch.ones(4, 4, requires_grad=True)
    store = zf.CheckpointStore("host")
    zf.checkpoint(lambda mask, x: torch.sparse.mm(mask, x).square(), sparse, x * 1, store=store).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == torch.full((4, 4), 2.0).tolist()


def test_a_function_may_append_to_a_list_of_the_caller() -> None:
    """As routers hand on their losses."""

    def run(call: Any) -> tuple[int, list[Any]]:
        model, losses = layers(3), list[Tensor]()

        def block(layer: nn.Module, x: Tensor, losses: list[Tensor]) -> Tensor:
            y = layer(x)
            losses.append(y.square().mean())
            return y

        x = given()
        for layer in model:
            x = call(block, layer, x, losses)
        found = len(losses)
        (x.sum() + sum(losses)).backward()
        return found, [p.grad for p in model.parameters()]

    count, expected = run(lambda block, *args: checkpoint(block, *args, use_reentrant=False))
    assert count == 3
    for store in (None, zf.CheckpointStore("host")):
        count, found = run(lambda block, *args, store=store: zf.checkpoint(block, *args, store=store))
        assert count == 3
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("order", [(0, 2), (0, 1), (0, 1, 2, 3), (0, 0, 1, 2), (0, 1, 1, 2)])
def test_blocks_of_a_group_that_are_left_out_or_called_otherwise_are_refused(order: tuple[int, ...]) -> None:
    """The first call has computed all three: an answer that the model did not ask for."""
    model = layers(6)
    zf.checkpoint_blocks(model, every=3)
    x = given()
    with pytest.raises(ValueError, match="do not simply follow each other.*use every=1"):
        for index in order:
            x = model[index](x)
        x.sum().backward()


def test_a_block_is_not_checkpointed_twice() -> None:
    model = nn.ModuleDict({"part": nn.Sequential(*layers(2)), "rest": nn.Sequential(*layers(2))})
    part = zf.checkpoint_blocks(model["part"], units=nn.Linear)
    with pytest.raises(ValueError, match=r"'part.0' is checkpointed already: call remove\(\)"):
        zf.checkpoint_blocks(model, units=nn.Linear)
    zf.checkpoint_blocks(model["rest"], units=nn.Linear)
    model["rest"](model["part"](given())).sum().backward()
    part.remove()


def test_calls_in_another_thread_are_not_inside() -> None:
    """What is inside a call keeps nothing, since it is made again; another thread's call is not."""
    store, kept, (linear,) = zf.CheckpointStore("host"), list[int](), layers(1)

    def outer(x: Tensor) -> Tensor:
        def other() -> None:
            before = store.nbytes["host"]
            made = zf.checkpoint(linear, given() * 2, store=store)
            kept.append(store.nbytes["host"] - before)
            made.sum().backward()

        if not kept:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return x.exp()

    zf.checkpoint(outer, given() * 1, store=store).sum().backward()
    assert kept[0] > 0
