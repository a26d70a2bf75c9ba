"""What a fleet of devices can do: memory, arithmetic, links."""

from __future__ import annotations

from dataclasses import dataclass

GB, GIB, TERA = 10**9, 2**30, 10**12


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way for bytes: its rate in bytes a second each way, and what a message takes at the least."""

    rate: float
    latency: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`devices` equal devices, `per_node` of them in a node."""

    name: str
    devices: int = 1
    per_node: int = 8
    device_memory: int
    """Bytes of one device that a process can have."""
    host_memory: int
    """Bytes of a node."""
    disk: int = 0
    """Bytes of a node."""
    flops: float
    """Of a 16-bit matrix product on one device, as measured for large ones; a second."""
    flops_fp32: float
    """The same in fp32 (TF32 where torch's default allows it: it does not)."""
    memory_rate: float
    """Bytes a second that a device's kernels read and write."""
    kernel_seconds: float = 4e-6
    """From the start of a kernel to the next one's, at the least."""
    host_seconds: float = 2e-5
    """Of the host, for each kernel of a training step: Python, autograd and the start itself."""
    inside: Link
    """Between devices of a node, each way, of one device."""
    across: Link
    """Between nodes, each way, of one device."""
    to_host: Link
    """Between a device and its host, each way."""
    host_update: float
    """Parameters a second that all cores of a node update with AdamW."""
    disk_read: float = 0.0
    disk_write: float = 0.0
    """Bytes a second of a node's disks."""
    kind: str = "cuda"
    """"cuda" or "cpu", where device and host are one memory."""
    source: str = "preset"
    """"preset", "measured" or "given"."""

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.per_node)
