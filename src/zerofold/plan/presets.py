"""Devices by name, with the figures that their makers publish.

A matrix product reaches less than the published peak, and a kernel less than the published rate of memory: 70% and 75%
are assumed. Measured are the H200's 16-bit product and its way to the host, and what 16 cores update; its fp32 product
follows from the time of a measured step.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from zerofold.plan.machine import GB, GIB, TERA, Link, Machine

_REACHED = 0.7
_HELD_BACK = 0.96  # of a GPU's memory: the driver's part and the context of a process come off
_HOST_UPDATE = 1e9  # AdamW on one host: 28 bytes a parameter at 28 GB/s of a few cores to 112 of many


@dataclass(frozen=True)
class Device:
    """One device. TFLOP/s of 16-bit and fp32 matrix products, GB and GB/s as published."""

    memory_gib: float
    flops_16: float
    flops_32: float
    memory_rate: float
    inside: float
    """GB/s each way to another device of the node: NVLink where there is one, else PCIe."""
    to_host: float
    """GB/s each way."""
    per_node: int = 8
    host_gib: float = 1024
    across: float = 25
    """GB/s each way to another node, for one device: 200 Gb/s."""
    reached: tuple[float, float] | None = None
    """TFLOP/s of 16-bit and fp32 products where they were measured."""


_DEVICES = {
    "V100-16": Device(16, 125, 15.7, 900, 150, 12, host_gib=512, across=12.5),
    "V100-32": Device(32, 125, 15.7, 900, 150, 12, host_gib=1536, across=12.5),
    "A100-40": Device(40, 312, 19.5, 1555, 300, 25),
    "A100-80": Device(80, 312, 19.5, 2039, 300, 25, host_gib=2048),
    "A10": Device(24, 125, 31.2, 600, 25, 25, per_node=4, host_gib=256, across=12.5),
    "L40S": Device(48, 362, 91.6, 864, 25, 25, across=25),
    "H100": Device(80, 989, 67, 3350, 450, 55, host_gib=2048, across=50),
    "H200": Device(141e9 / GIB, 989, 67, 4800, 450, 55, host_gib=2048, across=50, reached=(792, 51)),
    "B200": Device(192e9 / GIB, 2250, 80, 8000, 900, 55, host_gib=2048, across=50),
    "MI300X": Device(192, 1307, 163, 5300, 448, 55, host_gib=2048, across=50),
    "3090": Device(24, 71, 35.6, 936, 12, 25, per_node=1, host_gib=64, across=1.25),
    "4090": Device(24, 165, 82.6, 1008, 25, 25, per_node=1, host_gib=128, across=1.25),
    "5090": Device(32, 210, 104.8, 1792, 50, 55, per_node=1, host_gib=128, across=1.25),
}


def preset_names() -> list[str]:
    return [*_DEVICES, "cpu"]


def preset(name: str, *, devices: int = 1, per_node: int | None = None) -> Machine:
    """A fleet of devices by name; upper or lower case.

    >>> machine = preset("h100", devices=16)
    >>> machine.nodes, machine.device_memory // 2**30
    (2, 76)
    """
    if name.lower() == "cpu":
        return _cpu(devices, per_node)
    found = {each.lower(): each for each in _DEVICES}.get(name.lower())
    if found is None:
        begun = [each for each in preset_names() if each.lower().startswith(name.lower())]
        near = begun or difflib.get_close_matches(name, preset_names(), n=1, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose one of {', '.join(preset_names())}"
        raise ValueError(f"--preset {name!r} is not known; {hint}")
    device = _DEVICES[found]
    reached_16, reached_32 = device.reached or (_REACHED * device.flops_16, _REACHED * device.flops_32)
    nodes = per_node or device.per_node
    return Machine(
        name=found,
        devices=devices,
        per_node=nodes,
        device_memory=int(device.memory_gib * GIB * _HELD_BACK),
        host_memory=int(device.host_gib * GIB),
        flops=reached_16 * TERA,
        flops_fp32=reached_32 * TERA,
        memory_rate=device.memory_rate * GB * 0.75,
        inside=Link(rate=device.inside * GB, latency=5e-6),
        across=Link(rate=device.across * GB, latency=1e-5),
        to_host=Link(rate=device.to_host * GB, latency=1e-5),
        host_update=4e9 if device.host_gib >= 1024 else _HOST_UPDATE,
        disk_read=3 * GB,
        disk_write=2.5 * GB,
    )


def preset_of(device_name: str) -> str | None:
    """The preset of a device as its driver calls it; None where there is none.

    >>> preset_of("NVIDIA A100-SXM4-80GB"), preset_of("NVIDIA GeForce RTX 4090"), preset_of("NVIDIA H200")
    ('A100-80', '4090', 'H200')
    >>> preset_of("NVIDIA A100-PCIE-40GB"), preset_of("NVIDIA T4")
    ('A100-40', None)
    """
    words = re.split(r"[^A-Z0-9]+", device_name.upper().replace("GB", ""))
    fitting = [name for name in _DEVICES if all(part in words for part in name.upper().split("-"))]
    return max(fitting, key=len, default=None)


def peak_flops(name: str, *, in_16_bit: bool = True) -> float:
    """What matrix products of a preset's device could reach in a second, as published: what MFU is a part of.

    >>> peak_flops("A100-80")
    312000000000000.0
    """
    device = _DEVICES[name]
    return float((device.flops_16 if in_16_bit else device.flops_32) * TERA)


def _cpu(devices: int, per_node: int | None) -> Machine:
    """A process for each 8 GiB and two cores or so: what a laptop or a small server has."""
    return Machine(
        name="cpu",
        devices=devices,
        per_node=per_node or 4,
        device_memory=8 * GIB,
        host_memory=32 * GIB,
        flops=0.1 * TERA,
        flops_fp32=0.1 * TERA,
        memory_rate=20 * GB,
        inside=Link(rate=2 * GB, latency=5e-5),
        across=Link(rate=1.25 * GB, latency=1e-4),
        to_host=Link(rate=10 * GB),
        host_update=2e8,
        disk_read=1 * GB,
        disk_write=1 * GB,
        kind="cpu",
    )


def changed(machine: Machine, **given: object) -> Machine:
    """The same machine with what was given by hand instead; None leaves a figure as it is."""
    return replace(machine, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
