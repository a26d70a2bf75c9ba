"""The state of every random generator that training may draw from."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """Of every generator that training may draw from, on this rank."""
    python, numbers = random.getstate(), numpy.random.get_state(legacy=True)
    assert isinstance(numbers, tuple)
    found: dict[str, Any] = {
        "python": (python[0], torch.tensor(python[1]), python[2]),
        "numpy": (numbers[0], torch.from_numpy(numbers[1].astype(numpy.int64)), *numbers[2:]),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_rng_state(device)
    return found


def set_random_states(found: Mapping[str, Any], device: torch.device) -> None:
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, *rest = found["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
    torch.set_rng_state(found["torch"])
    if device.type != "cpu" and "device" in found:
        torch.get_device_module(device).set_rng_state(found["device"], device)
