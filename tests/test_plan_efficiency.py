"""The readings that the model of arithmetic intensity must reproduce, at the ZeRO-Infinity paper's V100."""

from __future__ import annotations

import pytest

from zerofold.plan.efficiency import (
    bandwidth_for,
    checkpoint_intensity,
    computation_per_iteration,
    efficiency,
    optimizer_intensity,
    parameter_intensity,
)

PEAK, SEQUENCE = 70e12, 1024
GB = 1e9


def test_parameters_at_70_gb_a_second_pass_half_even_at_batch_1() -> None:
    assert efficiency(parameter_intensity(1, SEQUENCE), 70 * GB, PEAK) > 0.5
    assert efficiency(parameter_intensity(1, SEQUENCE), 60 * GB, PEAK) < 0.5


def test_optimizer_states_need_about_four_times_that() -> None:
    parameters = bandwidth_for(0.5, parameter_intensity(1, SEQUENCE), PEAK)
    states = bandwidth_for(0.5, optimizer_intensity(1, SEQUENCE), PEAK)
    assert states / parameters == pytest.approx(4)
    assert efficiency(optimizer_intensity(1, SEQUENCE), 4 * 70 * GB, PEAK) > 0.5
    assert efficiency(optimizer_intensity(1, SEQUENCE), 3 * 70 * GB, PEAK) < 0.5


def test_at_batch_2_one_and_a_half_terabytes_give_90_percent() -> None:
    assert efficiency(optimizer_intensity(2, SEQUENCE), 1500 * GB, PEAK) >= 0.9
    assert efficiency(optimizer_intensity(1, SEQUENCE), 1500 * GB, PEAK) < 0.9


def test_checkpoints_need_two_gb_a_second_and_less_beyond_8k() -> None:
    assert efficiency(checkpoint_intensity(2048, 1), 2 * GB, PEAK) > 0.5
    assert efficiency(checkpoint_intensity(2048, 1), 1 * GB, PEAK) < 0.5
    for hidden in (8192, 16384, 65536):
        assert efficiency(checkpoint_intensity(hidden, 1), 1 * GB, PEAK) > 0.5


def test_intensities_are_computation_over_bytes_moved() -> None:
    """The three short formulas follow from computation per iteration and the bytes of each state."""
    samples, layers, hidden, every = 3, 24, 2048, 2
    parameters = 12 * layers * hidden**2
    flops = computation_per_iteration(samples, SEQUENCE, parameters)
    assert flops / (2 * 4 * parameters) == parameter_intensity(samples, SEQUENCE)
    assert flops / (2 * 16 * parameters) == optimizer_intensity(samples, SEQUENCE)
    stored = 2 * samples * SEQUENCE * hidden * layers / every
    assert flops / (2 * stored) == checkpoint_intensity(hidden, every)


def test_an_efficiency_that_is_never_reached_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        bandwidth_for(1.0, 1024, PEAK)
