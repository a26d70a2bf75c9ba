"""Updates under backward, and states that stay on the device: to the bits of those that wait for the norm and go home,
whatever happens before the step.

On the CPU, through a device that is the host (`test_through_device.py`); on a GPU, `test_gpu_offload.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_offload import states, train
from tests.test_through_device import backward, updated_through_the_device
from torch import Tensor, nn

import zerofold as zf
from zerofold.engine import Engine
from zerofold.optim.away import through_device

PLACES: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": "host"},
    "all": {"optimizer": "host", "parameters": "host"},
    "gradients stay": {"optimizer": "host", "gradients": "device"},
}
ALL_BLOCKS = 26  # chunks of two blocks
NEVER = 1e9  # a clip that does not bind

Between = Callable[[Any, torch.optim.Optimizer], Any]


def early_elements(model: nn.Module) -> float:
    return zf.ledger(model).snapshot()["offload"]["update"]["early_elements"]


WAYS: tuple[dict[str, Any], ...] = (
    {"ahead": ALL_BLOCKS},
    {"ahead": 64, "early": True},  # all, and room for others
    {"lasting": 18},  # of 29
)


def runs(between: Between, *, clip: float = NEVER, **options: Any) -> list[tuple[list[Tensor], float, Any]]:
    """In each way: two steps, a backward, `between`, a step, and one more."""
    found = []
    for way in WAYS:
        with updated_through_the_device(1.0, clip=clip, **(way | options)) as (model, optimizer):
            train(model, optimizer, 2)
            backward(model, 2)
            seen = between(model, optimizer)
            optimizer.step()
            stood = early_elements(model)
            optimizer.zero_grad()
            train(model, optimizer, 1, first=3)
            found.append((states(model, optimizer), stood, seen))
    return found


def nothing(model: Any, optimizer: torch.optim.Optimizer) -> None: ...


def halve_a_gradient(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["params"][4].grad.mul_(0.5)


def change_gradients_unseen(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for face in optimizer.param_groups[0]["params"]:
        face.grad.raw_local.mul_(0.5)


def clip_by_hand(model: Any, optimizer: torch.optim.Optimizer) -> None:
    zf.clip_grad_norm_(model, 1e-3)


def other_rate(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 3e-3


def another_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    backward(model, 7)


def another_batch(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model, 7)


def a_batch_that_leaves_a_layer_out(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """So that the second backward cuts the block into other chunks than the first."""
    optimizer.zero_grad()
    block = model[2]
    block.forward = lambda x: x + block.down(torch.relu(block.up(x)))
    backward(model, 7)
    del block.forward


def an_overflow(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.zero_grad()
    backward(model, 7, float("inf"))
    optimizer.step()
    assert zf.last_step(model).skipped
    optimizer.zero_grad()
    seen = states(model, optimizer)
    backward(model, 8)
    return seen


def a_look(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    return states(model, optimizer)


def a_forward(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    with torch.no_grad():
        return [model(torch.ones(2, 16))]


def a_change(model: Any, optimizer: torch.optim.Optimizer) -> None:
    with zf.full_params(model), torch.no_grad():
        model[1].up.weight.mul_(0.5)


def loaded_states(model: Any, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state_dict()
    for each in state["state"].values():
        each["exp_avg"] = torch.full(each["exp_avg"].shape, 1e-3)  # without having looked at what is there
    optimizer.load_state_dict(state)


def states_set_by_hand(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for face in optimizer.param_groups[0]["params"]:
        optimizer.state[face]["exp_avg"] = torch.full(face.shape, 1e-3)


def one_gradient_less(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """So that the block is cut into other chunks."""
    next(model[2].parameters()).grad = None


def a_frozen_block(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model[2].parameters():
        parameter.grad = None


READS_WEIGHTS = ("a_forward", "another_batch", "a_look")  # which in fp32 are the states themselves
BETWEEN = [
    halve_a_gradient,
    change_gradients_unseen,
    clip_by_hand,
    other_rate,
    another_backward,
    another_batch,
    a_batch_that_leaves_a_layer_out,
    an_overflow,
    a_look,
    a_forward,
    a_change,
    loaded_states,
    states_set_by_hand,
    one_gradient_less,
    a_frozen_block,
]


def differences(places: list[str]) -> list[str]:
    wrong = []
    for place in places:
        for clip in (NEVER, 0.5):
            (expected, none, _), (found, stood, _), (lasting, _, _) = runs(nothing, clip=clip, place=PLACES[place])
            if not all(map(torch.equal, found, expected)) or not all(map(torch.equal, lasting, expected)):
                wrong.append(f"{place}, clip {clip}: other values")
            # Of gradients on the device alone, a CPU takes the norm only when all copies are over.
            if none or bool(stood) != (clip == NEVER and place != "gradients stay"):
                wrong.append(f"{place}, clip {clip}: {none} and {stood} elements were updated early")
    return wrong


def test_an_early_update_is_that_of_the_step(ranks: Any) -> None:
    assert ranks(1, differences, list(PLACES)) == [[]]


def test_all_of_a_block_is_updated_early_and_the_first_ones_wait(ranks: Any) -> None:
    assert ranks(1, blocks_updated_early, ALL_BLOCKS - 1) == [[2]]
    assert ranks(1, blocks_updated_early, ALL_BLOCKS) == [[1, 2]]


def blocks_updated_early(room: int) -> list[int]:
    """By what forward computes with: the new values of the others are made in the step."""
    with updated_through_the_device(1.0, early=True, clip=NEVER, ahead=room) as (model, optimizer):
        train(model, optimizer, 2)
        backward(model, 2)
        engine = Engine.of(model)
        engine.updates._early._jobs[-1].wait()  # type: ignore[union-attr]
        before = [slab.raw_shard.clone() for slab in engine.slabs()]
        engine.updates.finish()  # type: ignore[union-attr]
        after = [slab.raw_shard for slab in engine.slabs()]
        return [index for index, pair in enumerate(zip(before, after, strict=True)) if not torch.equal(*pair)]


def other_after(name: str) -> list[str]:
    between = {each.__name__: each for each in BETWEEN}[name]
    wrong = []
    places = [("optimizer", "bf16"), ("all", "bf16")]
    for place, precision in [*places, ("all", None)] if name in READS_WEIGHTS else places:
        (expected, _, before), *others = runs(between, place=PLACES[place], precision=precision)
        for way, (found, _, seen) in zip(("early", "lasting"), others, strict=True):
            if not all(map(torch.equal, found, expected)):
                wrong.append(f"{place}, {precision}, {way}: other values after the steps")
            if seen is not None and not all(map(torch.equal, seen, before)):
                wrong.append(f"{place}, {precision}, {way}: other values between backward and step")
    return wrong


@pytest.mark.parametrize("name", [each.__name__ for each in BETWEEN])
def test_whatever_happens_before_the_step(ranks: Any, name: str) -> None:
    assert ranks(1, other_after, name) == [[]]


def saved_before_the_step(folder: str, background: bool) -> bool:
    """In the background before a backward, which goes on while states are copied; or after it."""
    kept = []
    for number, way in enumerate(WAYS):
        target = Path(folder) / str(number)
        with updated_through_the_device(1.0, clip=NEVER, **way) as (model, optimizer):
            train(model, optimizer, 2)
            if background:
                saving = zf.save(model, optimizer, target, background=True)
                backward(model, 2)
                optimizer.step()
                saving.wait()
            else:
                backward(model, 2)
                zf.save(model, optimizer, target)
        with updated_through_the_device(0.0) as (model, optimizer):
            zf.load(model, optimizer, target)
            kept.append(states(model, optimizer))
    return all(all(map(torch.equal, kept[0], other)) for other in kept[1:])


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_before_the_step_has_the_old_states(ranks: Any, tmp_path: Path, background: bool) -> None:
    assert ranks(1, saved_before_the_step, str(tmp_path), background) == [True]


def sent_down(lasting: int) -> list[int]:
    """Elements of each of four steps, and when somebody looks, twice."""
    sent = [0]
    with pytest.MonkeyPatch.context() as patch:
        send = through_device.DeviceUpdate._send_down

        def count(self: Any, chunk: Any, *rest: Any) -> Any:
            sent[-1] += chunk.size
            return send(self, chunk, *rest)

        patch.setattr(through_device.DeviceUpdate, "_send_down", count)
        with updated_through_the_device(1.0, clip=NEVER, lasting=lasting) as (model, optimizer):
            for step in range(4):
                backward(model, step)
                optimizer.step()
                Engine.of(model).updates.finish_last()  # type: ignore[union-attr]
                optimizer.zero_grad()
                sent.append(0)
            zf.full(optimizer.param_groups[0]["params"][0])
            sent.append(0)
            zf.full(optimizer.param_groups[0]["params"][0])
    return sent


def test_states_that_stay_go_down_when_somebody_looks(ranks: Any) -> None:
    (nothing_stays,) = ranks(1, sent_down, 0)
    (some_stay,) = ranks(1, sent_down, 18)
    whole, rest = nothing_stays[0], some_stay[3]
    assert nothing_stays == [whole] * 4 + [0, 0]
    assert 0 < rest < whole / 2
    assert some_stay == [whole, some_stay[1], rest, rest, whole - rest, 0]
    assert rest < some_stay[1] < whole  # half of them stay from the second step on, the others from the third


def read_beside_states_on_their_way(seconds: float) -> Tensor:
    """What forward gives when gradients are where parameters were, so that these are made from their masters."""
    with pytest.MonkeyPatch.context() as patch:
        send = through_device.DeviceUpdate._send_down

        def slowly(*given: Any) -> Any:
            time.sleep(seconds)
            return send(*given)

        patch.setattr(through_device.DeviceUpdate, "_send_down", slowly)
        with updated_through_the_device(1.0, clip=NEVER, place=PLACES["all"]) as (model, optimizer):
            train(model, optimizer, 2)
            backward(model, 2)
            (found,) = a_forward(model, optimizer)
            return found


def test_masters_on_their_way_down_are_waited_for(ranks: Any) -> None:
    (at_once,), (late,) = (
        ranks(1, read_beside_states_on_their_way, 0.0),
        ranks(1, read_beside_states_on_their_way, 0.02),
    )
    assert torch.equal(at_once, late)


def begun_while_states_are_copied() -> int:
    with updated_through_the_device(1.0, early=True, clip=NEVER, ahead=ALL_BLOCKS) as (model, optimizer):
        train(model, optimizer, 2)
        engine = Engine.of(model)
        engine.before_change.append(lambda: None)
        backward(model, 2)
        return len(engine.updates._early._jobs)  # type: ignore[union-attr]


def test_nothing_is_begun_while_states_are_copied(ranks: Any) -> None:
    assert ranks(1, begun_while_states_are_copied) == [0]


def steps_in_vain() -> list[int]:
    with updated_through_the_device(1.0, early=True, ahead=ALL_BLOCKS, clip=1e-3) as (model, optimizer):
        begun = []
        for step in range(20):
            backward(model, step)
            begun.append(len(Engine.of(model).updates._early._jobs))  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return begun


def test_where_gradients_are_clipped_it_is_tried_seldom(ranks: Any) -> None:
    (begun,) = ranks(1, steps_in_vain)
    assert sum(count > 0 for count in begun) == 2, begun
