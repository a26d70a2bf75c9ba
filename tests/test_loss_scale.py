"""The loss scale moves exactly as DeepSpeed's, except at the smallest scale, where it waits before it gives up."""

from __future__ import annotations

import random
from typing import Any

import pytest

from zerofold.loss_scale import LossScale, LossScaleError, LossScaler

FOREVER = 10**9


def trajectory(settings: LossScale, steps: str) -> list[float]:
    """The scale after each step; 'x' is a step with an overflow, '.' one without."""
    scaler, found = LossScaler(settings), []
    for step in steps:
        scaler.update(step == "x")
        found.append(scaler.value)
    return found


# Recorded from DeepSpeed 0.19.8's DynamicLossScaler with raise_error_at_min_scale=False, which is not installed
# everywhere the tests run: settings, steps, scales.
RECORDED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"initial_power": 4, "window": 3, "hysteresis": 1},
        "........xx..x...x.....xxxxxxx....",
        "16 16 16 32 32 32 64 64 32 16 16 16 8 8 8 8 4 4 4 4 8 8 4 2 1 1 1 1 1 1 1 1 2",
    ),
    (
        {"initial_power": 4, "window": 3, "hysteresis": 2},
        "x.x.x....x.xx...x....x.xxxxx.....",
        "16 16 8 8 4 4 4 4 8 8 8 4 2 2 2 2 1 1 1 1 2 2 2 1 1 1 1 1 1 1 1 2 2",
    ),
    (
        {"initial_power": 4, "window": 3, "hysteresis": 2, "consecutive_hysteresis": True},
        "x.x.xx.xxx.x....xx.x.xxxx.x....xx",
        "16 16 16 16 16 8 8 8 4 2 2 2 2 2 2 4 4 2 2 2 2 2 1 1 1 1 1 1 1 1 2 2 1",
    ),
    (
        {"initial_power": 5, "window": 2, "hysteresis": 3, "minimum": 4.0},
        "xx.x..x...xxx....xxxxxxxxx.x...xx",
        "32 32 32 16 16 16 8 8 8 16 16 16 8 8 8 16 16 16 16 8 4 4 4 4 4 4 4 4 4 4 8 8 8",
    ),
    (
        {"initial_power": 5, "window": 2, "hysteresis": 3, "minimum": 4.0, "consecutive_hysteresis": True},
        "xx.xxx.xx.xxxxxx...xxxx.xxx..x...",
        "32 32 32 32 32 16 16 16 16 16 16 16 8 4 4 4 4 4 8 8 8 4 4 4 4 4 4 4 4 4 4 4 8",
    ),
    (
        {"initial_power": 3, "window": 1, "hysteresis": 1, "minimum": 3.0},
        "x.x..x...xxx....xx...",
        "4 4 3 3 6 3 3 6 12 6 3 3 3 6 12 24 12 6 6 12 24",
    ),
]


@pytest.mark.parametrize(("settings", "steps", "scales"), RECORDED)
def test_the_scale_moves_as_recorded(settings: dict[str, Any], steps: str, scales: str) -> None:
    assert trajectory(LossScale(**settings), steps) == [float(scale) for scale in scales.split()]


@pytest.mark.parametrize("minimum", [1.0, 6.0, 0.25])
@pytest.mark.parametrize("window", [1, 2, 7, 1000])
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_scale_moves_as_deepspeeds(
    monkeypatch: Any, hysteresis: int, consecutive: bool, window: int, minimum: float
) -> None:
    peer = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler", exc_type=ImportError)
    monkeypatch.setattr(peer.dist, "get_rank", lambda: 1)  # it logs on rank 0, and there is no process group here
    settings = LossScale(
        initial_power=12,
        window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        minimum=minimum,
        patience=FOREVER,
    )
    for often in (0.5 / window, 0.1, 0.5, 0.9):
        theirs = peer.DynamicLossScaler(
            init_scale=2**12,
            scale_window=window,
            min_scale=minimum,
            delayed_shift=hysteresis,
            consecutive_hysteresis=consecutive,
            raise_error_at_min_scale=False,
        )
        ours, generator = LossScaler(settings), random.Random(f"{hysteresis} {consecutive} {window} {often}")
        for step in range(4 * window if window > 100 else 400):
            overflow = generator.random() < often or theirs.cur_scale > 2.0**100
            theirs.update_scale(overflow)
            ours.update(overflow)
            assert ours.value == theirs.cur_scale, f"step {step}, overflows with probability {often}"


def test_it_doubles_again_and_again() -> None:
    """The first window lasts one step longer: DeepSpeed counts from the step after."""
    assert trajectory(LossScale(initial_power=0, window=1000), "." * 2001)[999:] == [1.0] + [2.0] * 1000 + [4.0]


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_it_gives_up_after_its_patience_at_the_minimum(hysteresis: int) -> None:
    scaler = LossScaler(LossScale(initial_power=1, hysteresis=hysteresis, patience=3))
    for _ in range(hysteresis):  # to the minimum: these overflows were not at it
        scaler.update(True)
    assert (scaler.value, scaler.skipped_in_a_row_at_minimum) == (1.0, 0)
    for expected in (1, 2, 0, 1, 2):  # a step without overflow makes it patient again
        scaler.update(expected > 0)
        assert scaler.skipped_in_a_row_at_minimum == expected
    with pytest.raises(LossScaleError) as caught:
        scaler.update(True, parameter="blocks.3.up.weight")
    for part in ("3 steps in a row", "loss scale of 1,", "lower learning rate", "bf16", "'blocks.3.up.weight'"):
        assert part in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert scaler.skipped == hysteresis + 5
    with pytest.raises(LossScaleError):  # and again, for whoever goes on
        scaler.update(True)


def test_overflows_that_hysteresis_stands_count_at_the_minimum_too() -> None:
    scaler = LossScaler(LossScale(initial_power=0, hysteresis=5, patience=3))
    scaler.update(True)
    scaler.update(True)
    with pytest.raises(LossScaleError):
        scaler.update(True)


@pytest.mark.parametrize(("static", "says"), [(1.0, "no loss scaling"), (1024, "a fixed loss scale of 1024")])
def test_a_static_scale_never_moves_but_has_patience_too(static: float, says: str) -> None:
    scaler = LossScaler(LossScale(static=static, window=1, hysteresis=1))
    for overflow in "....x..." + 19 * "x" + "." + 19 * "x":
        scaler.update(overflow == "x")
        assert scaler.value == static
    assert scaler.skipped == 39
    with pytest.raises(LossScaleError, match=says) as caught:
        scaler.update(True)
    assert ("static=None" in str(caught.value)) == (static > 1)


@pytest.mark.parametrize("settings", [{"hysteresis": 3}, {"hysteresis": 2, "consecutive_hysteresis": True}])
def test_a_scaler_goes_on_from_its_state(settings: dict[str, Any]) -> None:
    made = LossScale(initial_power=6, window=3, patience=4, **settings)
    generator = random.Random(3)
    steps = [generator.random() < 0.3 for _ in range(200)]
    for cut in range(0, 200, 7):
        first, second = LossScaler(made), LossScaler(made)
        for overflow in steps[:cut]:
            first.update(overflow)
        state = first.state_dict()
        assert all(type(value) in (int, float) for value in state.values())
        second.load_state_dict(state)
        for overflow in steps[cut:]:
            first.update(overflow)
            second.update(overflow)
            assert first.state_dict() == second.state_dict()


def test_a_state_meets_other_settings() -> None:
    state = LossScaler(LossScale(initial_power=1, hysteresis=9)).state_dict()
    scaler = LossScaler(LossScale(minimum=4.0, hysteresis=1))
    scaler.load_state_dict(state)
    assert scaler.value == 4.0
    assert scaler.state_dict()["tolerated"] == 0
    with pytest.raises(ValueError, match="has no clean, skipped"):
        scaler.load_state_dict({key: state[key] for key in ("value", "tolerated", "skipped_in_a_row_at_minimum")})


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"static": 0}, ValueError, "static=0 must be positive and finite; leave it out"),
        ({"static": float("inf")}, ValueError, "static=inf must be positive and finite"),
        ({"static": "dynamic"}, TypeError, "static='dynamic' must be a number"),
        ({"initial_power": 0.5}, TypeError, "initial_power=0.5 must be a whole number; 16 is usual"),
        ({"initial_power": -1}, ValueError, "initial_power=-1 must be at least 0"),
        ({"initial_power": 128}, ValueError, "initial_power=128: fp32 ends before"),
        ({"window": 0}, ValueError, "window=0 must be at least 1; 1000 is usual"),
        ({"hysteresis": 0}, ValueError, "hysteresis=0 must be at least 1; 1 halves"),
        ({"hysteresis": True}, TypeError, "hysteresis=True must be a whole number"),
        ({"consecutive_hysteresis": 1}, TypeError, "consecutive_hysteresis=1 must be True or False"),
        ({"minimum": 0}, ValueError, "minimum=0 must be positive and finite; 1.0 is usual"),
        ({"minimum": float("nan")}, ValueError, "minimum=nan must be positive"),
        ({"minimum": 4.0, "initial_power": 1}, ValueError, "minimum=4.0 is above the first scale, 2**1: lower minimum"),
        ({"patience": 0}, ValueError, "patience=0 must be at least 1"),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        LossScale(**wrong)
    assert says in str(caught.value)
