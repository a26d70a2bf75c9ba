"""Devices whose rates are known well enough to simulate them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zerofold.plan.machine import GB, GIB, TERA, Link, Machine

H200 = Machine(
    name="H200",
    device_memory=139 * GIB,
    host_memory=2000 * GB,
    flops=792 * TERA,
    flops_fp32=50 * TERA,
    memory_rate=3.6 * TERA,
    inside=Link(rate=360 * GB, latency=3e-6),
    across=Link(rate=45 * GB, latency=5e-6),
    to_host=Link(rate=55 * GB, latency=1e-5),
    host_update=4e9,
)
"""Matrix products and memory as measured on one; links as of 8 in a node, with a 400 Gb/s card each."""

MACHINES: Mapping[str, Machine] = MappingProxyType({"H200": H200})
