"""A wait on a GPU's stream, of a length in seconds.

torch's own counts cycles, and a GPU changes its rate with its load: by a fifth between one that only waits and one that
multiplies matrices beside it. The kernel here looks at a clock; it needs Triton, which comes with torch for GPUs.
"""

# The arguments of a kernel are Triton's, which has no types for them.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import statistics
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    _jit = triton.jit
except ImportError:
    HAS_TRITON = False

    def _jit(**options: Any) -> Any:
        return lambda function: function


@_jit(do_not_specialize=["nanoseconds"])
def _look_at_the_clock(nanoseconds):
    begin = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    now = begin
    while now - begin < nanoseconds:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


class Waiting:
    """Keeps the current stream of a GPU standing for a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cycles_per_second = 0.0 if HAS_TRITON else _calibrate(device)
        self.wait(1e-6)  # compiled now, and not in the middle of what is measured

    def wait(self, seconds: float) -> None:
        if HAS_TRITON:
            with torch.cuda.device(self._device):
                _look_at_the_clock[(1,)](round(seconds * 1e9), num_warps=1)
        else:
            torch.cuda._sleep(round(seconds * self._cycles_per_second))


def urgent_stream(device: torch.device) -> torch.cuda.Stream:
    """Its kernels begin when the next block of another ends, not when all blocks that wait have had their turn."""
    return torch.cuda.Stream(device, priority=-1)


def _calibrate(device: torch.device) -> float:
    """Cycles a second of the kernel that counts them, at the rate of a GPU that computes beside it."""
    cycles = 20_000_000  # some 10 ms
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    product, beside = torch.empty_like(matrix), urgent_stream(device)
    rates = []
    for _ in range(5):
        for _ in range(100):
            torch.mm(matrix, matrix, out=product)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(beside):
            before.record(beside)
            torch.cuda._sleep(cycles)
            after.record(beside)
        torch.cuda.synchronize(device)
        rates.append(cycles / (before.elapsed_time(after) / 1e3))
    return statistics.median(rates[1:])  # the first also loads kernels
