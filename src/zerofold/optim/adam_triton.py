"""The one-pass update on a GPU: one launch for all tensors of the same dtypes.

    program   0 1 2 3 4 5 ...           block_map   (tensor, block) of each program; kept between steps
    tensor    0 0 0 1 1 2 ...           table       (addresses, elements, seed) of each tensor; sent at every step
    block     0 1 2 0 1 0 ...

So a step costs the host one small upload and one launch, and the tensors may be elsewhere at the next step, as
gradients often are. Nothing waits for the GPU.
"""

# The arguments of a kernel are Triton's, which has no types for them.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofold.optim.onepass import AdamSettings, AdamTensors, Launch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    _jit = triton.jit
    _DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
except ImportError:  # a CPU-only torch comes without it; this file can be imported all the same
    HAS_TRITON = False

    def _jit(function: Any) -> Any:
        return function


BLOCK = 2048  # elements of a program: with 8 warps each thread has two 16-byte vectors of each fp32 tensor under way
WARPS = 8
VECTOR_BYTES = 16  # the widest load of a GPU


@_jit
def _adam_kernel(
    table,
    block_map,
    scale_pointer,
    clip_value,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    step_size,
    inverse_root,
    MASTER: tl.constexpr,  # noqa: N803 (dtypes and switches are compiled in)
    GRADIENT: tl.constexpr,  # noqa: N803
    EXP_AVG: tl.constexpr,  # noqa: N803
    EXP_AVG_SQ: tl.constexpr,  # noqa: N803
    COPY: tl.constexpr,  # noqa: N803
    HAS_COPY: tl.constexpr,  # noqa: N803
    HAS_SCALE: tl.constexpr,  # noqa: N803
    HAS_CLIP: tl.constexpr,  # noqa: N803
    DECOUPLED: tl.constexpr,  # noqa: N803
    MAXIMIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    VECTOR: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0)
    row = table + tl.load(block_map + 2 * program) * 8  # columns: see _table
    start = tl.load(block_map + 2 * program + 1).to(tl.int64) * BLOCK
    left = tl.load(row + 5) - start
    master_at = _address(row, 0, start, MASTER, VECTOR)
    gradient_at = _address(row, 1, start, GRADIENT, VECTOR)
    exp_avg_at = _address(row, 2, start, EXP_AVG, VECTOR)
    exp_avg_sq_at = _address(row, 3, start, EXP_AVG_SQ, VECTOR)
    copy_at = _address(row, 4, start, COPY, VECTOR)
    index = tl.arange(0, BLOCK)

    # A mask takes the vectors apart, so only the last block of a tensor has one. It costs a second copy of the loads
    # and stores, and none of the arithmetic: the values of both ways join in between.
    whole = left >= BLOCK
    if whole:
        gradient = tl.load(gradient_at + index).to(tl.float32)
        master = tl.load(master_at + index).to(tl.float32)
        exp_avg = tl.load(exp_avg_at + index).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sq_at + index).to(tl.float32)
    else:
        mask = index < left
        gradient = tl.load(gradient_at + index, mask, other=0.0).to(tl.float32)
        master = tl.load(master_at + index, mask, other=0.0).to(tl.float32)
        exp_avg = tl.load(exp_avg_at + index, mask, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sq_at + index, mask, other=0.0).to(tl.float32)

    if HAS_SCALE:
        gradient = gradient * tl.load(scale_pointer)
    if HAS_CLIP:  # by comparisons, which leave a NaN as it is
        gradient = tl.where(gradient > clip_value, clip_value, gradient)
        gradient = tl.where(gradient < -clip_value, -clip_value, gradient)
    if MAXIMIZE:
        gradient = -gradient
    if DECOUPLED:
        master = master - decay * master
    else:
        gradient = gradient + decay * master
    exp_avg = beta1 * exp_avg + one_minus_beta1 * gradient
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * gradient * gradient
    # torch divides by the root; its reciprocal saves one of three slow operations and moves a last bit.
    denominator = tl.sqrt_rn(exp_avg_sq) * inverse_root + eps
    master = master - tl.div_rn(step_size * exp_avg, denominator)

    if MASTER.is_bf16() or EXP_AVG.is_bf16() or EXP_AVG_SQ.is_bf16():
        # Seven rounds of Philox pass the usual tests of randomness, and cost a third less than ten.
        noise0, noise1, noise2, _ = tl.randint4x(tl.load(row + 6), start + index, 7)
        if MASTER.is_bf16():
            master = _stochastic(master, noise0)
        if EXP_AVG.is_bf16():
            exp_avg = _stochastic(exp_avg, noise1)
        if EXP_AVG_SQ.is_bf16():
            exp_avg_sq = _stochastic(exp_avg_sq, noise2)

    if whole:
        tl.store(master_at + index, master.to(MASTER))
        tl.store(exp_avg_at + index, exp_avg.to(EXP_AVG))
        tl.store(exp_avg_sq_at + index, exp_avg_sq.to(EXP_AVG_SQ))
        if HAS_COPY:
            tl.store(copy_at + index, master.to(COPY))
    else:
        mask = index < left
        tl.store(master_at + index, master.to(MASTER), mask)
        tl.store(exp_avg_at + index, exp_avg.to(EXP_AVG), mask)
        tl.store(exp_avg_sq_at + index, exp_avg_sq.to(EXP_AVG_SQ), mask)
        if HAS_COPY:
            tl.store(copy_at + index, master.to(COPY), mask)


@_jit
def _address(row, column: tl.constexpr, start, DTYPE: tl.constexpr, VECTOR: tl.constexpr):  # noqa: N803
    """Where the block of one tensor begins. The compiler cannot know the alignment of an address from a table."""
    pointer = tl.load(row + column).to(tl.pointer_type(DTYPE)) + start
    return tl.multiple_of(pointer, VECTOR * (DTYPE.primitive_bitwidth // 8))


@_jit
def _stochastic(values, noise):
    """fp32 values that bf16 has, up or down by chance: see adam_plain.stochastic."""
    bits = values.to(tl.uint32, bitcast=True) + (noise.to(tl.uint32, bitcast=True) & 0xFFFF)
    rounded = ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    return tl.where(values != values, values, rounded)  # a carry could turn a NaN into zero


class _Group(NamedTuple):
    """Tensors of one launch."""

    dtypes: tuple[torch.dtype, ...]
    copy: torch.dtype | None
    vector: int
    step: int
    table: Tensor
    block_map: Tensor
    members: list[AdamTensors]
    """The table has their addresses alone. A gradient that came from the host is nobody else's."""


def prepare(tensors: Sequence[AdamTensors], settings: AdamSettings, clip_value: float | None) -> Launch:
    """Uploads the tables, which takes the host most of the time; what it returns only launches."""
    device = tensors[0].master.device
    # What is compiled in, and the step, which most often all tensors share: so it need not be in the table.
    alike: dict[tuple[Any, ...], list[AdamTensors]] = defaultdict(list)
    for each in tensors:
        held = tuple(None if t is None else t.dtype for t in each[:5])
        alike[held, _vector(each), each.step].append(each)
    on_gpu = device.type == "cuda"  # Triton's interpreter, which the tests use, runs this on the CPU
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    groups = []
    for ((*dtypes, copy), vector, step), members in alike.items():
        sizes = tuple(each.master.numel() for each in members)
        tables = _table(members, device), _block_map(sizes, device, stream)
        groups.append(_Group(tuple(dtypes), copy, vector, step, *tables, members))

    def launch(scale: Tensor | None) -> None:
        with torch.cuda.device(device) if on_gpu else nullcontext():
            for group in groups:
                _launch(group, settings, scale, clip_value)

    return launch


def _launch(group: _Group, settings: AdamSettings, scale: Tensor | None, clip_value: float | None) -> None:
    _adam_kernel[(len(group.block_map),)](
        group.table,
        group.block_map,
        group.table if scale is None else scale,
        0.0 if clip_value is None else clip_value,
        settings.weight_decay * (settings.lr if settings.decoupled else 1.0),
        settings.beta1,
        1 - settings.beta1,
        settings.beta2,
        1 - settings.beta2,
        settings.eps,
        settings.step_size(group.step),
        1 / settings.root_of_correction(group.step),
        *(_DTYPES[dtype] for dtype in group.dtypes),
        COPY=_DTYPES[group.copy or group.dtypes[0]],
        HAS_COPY=group.copy is not None,
        HAS_SCALE=scale is not None,
        HAS_CLIP=clip_value is not None,
        DECOUPLED=settings.decoupled,
        MAXIMIZE=settings.maximize,
        BLOCK=BLOCK,
        VECTOR=group.vector,
        num_warps=WARPS,
    )


def _vector(each: AdamTensors) -> int:
    """How many elements a thread may load at once from every one of the tensors.

    The same number for all dtypes, so that a thread has the same elements of each and none change hands.
    """
    held = [t for t in each[:5] if t is not None]
    count = VECTOR_BYTES // max(t.element_size() for t in held)
    while any(t.data_ptr() % (count * t.element_size()) for t in held):
        count //= 2
    return count


def _table(members: Sequence[AdamTensors], device: torch.device) -> Tensor:
    """A row for each tensor: five addresses, the number of elements, the seed, and a filler."""
    rows = [
        [0 if t is None else t.data_ptr() for t in each[:5]] + [each.master.numel(), each.seed, 0] for each in members
    ]
    # From pinned memory the upload does not wait for the GPU, and torch keeps the memory until it is done.
    pinned = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


@lru_cache(maxsize=1024)
def _block_map(sizes: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """(tensor, block) for each program. It follows from the arguments alone, so keeping it is never wrong.

    The stream is among them because the upload is in its order, and so is the end of the memory's life.
    """
    blocks = torch.tensor([-(-size // BLOCK) for size in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
    block = torch.arange(len(tensor)) - torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)
    pairs = torch.stack([tensor, block], dim=1).int()
    return (pairs.pin_memory() if device.type == "cuda" else pairs).to(device, non_blocking=True)
