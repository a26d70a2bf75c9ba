"""The host's update in one call: the bits of torch's own, and no lock of the interpreter's while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from zerofold.optim import adam_strip
from zerofold.optim.adam_strip import Numbers, Strip, update_strip

SIZE = 1000  # no multiple of a block


def _strip(dtype: torch.dtype, *, size: int = SIZE, makes: bool = True) -> Strip:
    torch.manual_seed(0)
    master, gradient = torch.randn(size), torch.randn(size).to(dtype)
    made = torch.empty(size, dtype=torch.bfloat16) if makes else None
    return Strip(master, gradient, torch.randn(size), torch.rand(size), made)


def _numbers(*, divisor: float | None = None, decoupled: bool = True) -> Numbers:
    scale = None if divisor is None else torch.tensor(divisor)
    return Numbers([torch.tensor(3.0)], scale, decoupled, 1e-2, 0.9, 0.95, 0.1, 1e-8, False)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("divisor", [None, 3.0], ids=["as it is", "divided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_strip_has_the_bits_of_torchs_optimizer(dtype: torch.dtype, divisor: float | None, decoupled: bool) -> None:
    strip, numbers = _strip(dtype), _numbers(divisor=divisor, decoupled=decoupled)
    parameter = torch.nn.Parameter(strip.master.clone())
    parameter.grad = strip.gradient.float() / (divisor or 1.0)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    state = {"exp_avg": strip.exp_avg.clone(), "exp_avg_sq": strip.exp_avg_sq.clone(), "step": torch.tensor(2.0)}
    optimizer.state[parameter].update(state)
    for _ in range(3):  # TorchScript compiles anew after the first calls
        again = Strip(*(None if t is None else t.clone() for t in strip))  # type: ignore[arg-type]
        update_strip(again, numbers, torch.empty(64))
        if again.gradient.dtype is not torch.float32:
            assert torch.equal(again.gradient, strip.gradient)
    optimizer.step()
    assert torch.equal(again.master, parameter.detach())
    assert torch.equal(again.exp_avg, optimizer.state[parameter]["exp_avg"])
    assert torch.equal(again.exp_avg_sq, optimizer.state[parameter]["exp_avg_sq"])
    assert again.made is not None
    assert torch.equal(again.made, parameter.detach().bfloat16())


def test_the_new_parameter_may_take_the_place_of_the_gradient() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        apart, strip = _strip(dtype), _strip(dtype)
        place = strip.gradient.view(torch.uint8)[: 2 * SIZE].view(torch.bfloat16)
        update_strip(apart, _numbers(), torch.empty(64))
        update_strip(strip._replace(made=place), _numbers(), torch.empty(64))
        assert apart.made is not None
        assert torch.equal(place, apart.made)


def _calls_from_python(update: Callable[[Strip, Numbers, torch.Tensor], None], blocks: int) -> int:
    """Into torch: after each of them a thread asks for the lock of the interpreter again."""
    strip, calls = _strip(torch.bfloat16, size=64 * blocks), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "c_call" and getattr(argument, "__name__", "") not in ("append", "len")

    update(strip, _numbers(), torch.empty(64))
    sys.setprofile(count)
    try:
        update(strip, _numbers(), torch.empty(64))
    finally:
        sys.setprofile(None)
    return calls


def test_it_calls_torch_as_often_for_many_blocks_as_for_few() -> None:
    def in_python(strip: Strip, numbers: Numbers, room: torch.Tensor) -> None:
        with torch.no_grad():
            adam_strip._update_blocks(*adam_strip._blocks(strip, numbers, room), *numbers)

    assert _calls_from_python(update_strip, 64) == _calls_from_python(update_strip, 4)
    assert _calls_from_python(in_python, 64) > _calls_from_python(in_python, 4) + 3 * 50  # three operations a block


def test_a_torch_whose_script_leaves_the_update_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    local = adam_strip._LOOP
    for given in ("masters[index]", "gradient", "averages[index]", "squares[index]"):  # lists that TorchScript makes
        local = local.replace(f"{given}, ", f"[{given}[0]], ")
    assert local != adam_strip._LOOP
    monkeypatch.setattr(adam_strip, "_LOOP", local)
    adam_strip._loop.cache_clear()
    try:
        strip, before = _strip(torch.bfloat16), _strip(torch.bfloat16)
        with pytest.warns(UserWarning, match="Python does"):
            update_strip(strip, _numbers(), torch.empty(64))
        assert not torch.equal(strip.master, before.master)
    finally:
        adam_strip._loop.cache_clear()
