"""The one-pass update: equal to torch's optimizers, on every device and for every dtype it takes.

The GPU's kernel also runs on the CPU where Triton is installed, slowly: TRITON_INTERPRET=1 pytest tests/test_onepass.py
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from zerofold.optim import adam_cpu, adam_plain, adam_triton, onepass
from zerofold.optim.onepass import AdamSettings, AdamTensors, Launch, adam

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SETTINGS = AdamSettings(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
GPU_BLOCK = adam_triton.BLOCK
SIZES = (1, 7, GPU_BLOCK - 1, GPU_BLOCK, GPU_BLOCK + 1, 3 * GPU_BLOCK + 5)
INTERPRETED = adam_triton.HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
KERNELS = [
    "plain",
    "cpu",
    pytest.param("interpreter", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=needs_gpu),
]
on_every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def run(
    kernel: str,
    tensors: Sequence[AdamTensors],
    settings: AdamSettings = SETTINGS,
    *,
    scale: float | None = None,
    clip_value: float | None = None,
) -> None:
    """One update by this kernel, in place."""
    coefficient = None if scale is None else torch.tensor(scale, device=tensors[0].master.device)
    if kernel == "plain":
        adam_plain.update(tensors, settings, coefficient, clip_value)
    elif kernel == "interpreter":
        adam_triton.prepare(tensors, settings, clip_value)(coefficient)
    else:
        adam(tensors, settings, scale=coefficient, clip_value=clip_value)


def device_of(kernel: str) -> str:
    return "cuda" if kernel == "cuda" else "cpu"


def make(
    size: int,
    *,
    device: str = "cpu",
    master: torch.dtype = F32,
    gradient: torch.dtype = F32,
    moments: torch.dtype = F32,
) -> AdamTensors:
    """A parameter in the midst of training."""
    generator = torch.Generator().manual_seed(size)
    values = [torch.randn(size, generator=generator).abs() + 0.1 for _ in range(4)]
    signs = [torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1 for _ in range(3)]
    dtypes = (master, gradient, moments)
    signed = [(v * s).to(device, d) for v, s, d in zip(values[:3], signs, dtypes, strict=True)]
    return AdamTensors(*signed, values[3].to(device, moments), None, step=3, seed=size)


def by_torch(each: AdamTensors, settings: AdamSettings, gradient: Tensor, *, fused: bool) -> list[Tensor]:
    """The new master and moments of torch's own optimizer."""
    parameter = torch.nn.Parameter(each.master.clone())
    parameter.grad = gradient.clone()
    kind = torch.optim.AdamW if settings.decoupled else torch.optim.Adam
    optimizer = kind(
        [parameter],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        maximize=settings.maximize,
        fused=fused,
    )
    exp_avg, exp_avg_sq = each.exp_avg.clone(), each.exp_avg_sq.clone()
    step = torch.tensor(float(each.step - 1), device=parameter.device)
    optimizer.state[parameter] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    optimizer.step()
    return [parameter.detach(), exp_avg, exp_avg_sq]


def assert_near(found: AdamTensors, expected: Sequence[Tensor], rtol: float, atol: float = 0.0) -> None:
    for actual, wanted in zip((found.master, found.exp_avg, found.exp_avg_sq), expected, strict=True):
        torch.testing.assert_close(actual.float(), wanted.float(), rtol=rtol, atol=atol)


@on_every_kernel
@pytest.mark.parametrize("changes", [{}, {"decoupled": False}, {"maximize": True}, {"weight_decay": 0.0}])
@pytest.mark.parametrize(("scale", "clip_value"), [(None, None), (0.3, None), (None, 0.5), (0.3, 0.2)])
def test_it_equals_torchs_optimizer(
    kernel: str, changes: dict[str, bool], scale: float | None, clip_value: float | None
) -> None:
    settings = replace(SETTINGS, **changes)
    tensors = [make(size, device=device_of(kernel)) for size in SIZES]
    gradients = [each.gradient * (1.0 if scale is None else scale) for each in tensors]
    gradients = [g if clip_value is None else g.clamp(-clip_value, clip_value) for g in gradients]
    expected = [by_torch(each, settings, g, fused=True) for each, g in zip(tensors, gradients, strict=True)]
    run(kernel, tensors, settings, scale=scale, clip_value=clip_value)
    for each, wanted in zip(tensors, expected, strict=True):
        assert_near(each, wanted, rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("decoupled", [True, False])
def test_on_the_cpu_fp32_has_the_bits_of_torchs_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, decoupled: bool, threads: int
) -> None:
    """Blocks end where vectors end, so only the end of a tensor is not a whole vector, here and there."""
    monkeypatch.setattr(adam_cpu, "BLOCK", 256)
    monkeypatch.setattr(adam_cpu, "VIEWS_AT_ONCE", 2)
    settings = replace(SETTINGS, decoupled=decoupled)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in (256, 512, 256 * 9, 256 * 9 + 1, 256 * 9 - 1, 5000):
            each = make(size)
            expected = by_torch(each, settings, each.gradient, fused=True)
            adam([each], settings)
            for found, wanted in zip((each.master, each.exp_avg, each.exp_avg_sq), expected, strict=True):
                assert torch.equal(found, wanted), size
    finally:
        torch.set_num_threads(before)


def test_a_tensor_of_several_blocks_on_the_cpu() -> None:
    size = 2 * adam_cpu.BLOCK * torch.get_num_threads() + 1
    each, other = make(size, gradient=BF16), make(size, gradient=BF16)
    run("cpu", [each], scale=0.5)
    run("plain", [other], scale=0.5)
    assert_near(each, (other.master, other.exp_avg, other.exp_avg_sq), rtol=1e-5, atol=5e-7)


@on_every_kernel
@pytest.mark.parametrize("gradient", [F32, BF16, F16])
@pytest.mark.parametrize("moments", [F32, BF16])
@pytest.mark.parametrize("master", [F32, BF16])
@pytest.mark.parametrize("copy", [None, BF16, F16])
def test_every_combination_of_dtypes(
    kernel: str, master: torch.dtype, moments: torch.dtype, gradient: torch.dtype, copy: torch.dtype | None
) -> None:
    if kernel == "interpreter" and copy == BF16 and master == F32:
        pytest.skip("Triton's interpreter cuts bf16 off instead of rounding; the compiled kernel uses cvt.rn")
    device = device_of(kernel)
    tensors = [make(size, device=device, master=master, gradient=gradient, moments=moments) for size in SIZES]
    if copy is not None:
        tensors = [each._replace(copy=torch.empty_like(each.master, dtype=copy)) for each in tensors]
    # In fp32 throughout, from the same start, to be rounded once.
    exact = [AdamTensors(*(t.clone().float() for t in each[:4]), copy=None, step=each.step, seed=0) for each in tensors]
    untouched = [each.gradient.clone() for each in tensors]
    run(kernel, tensors, scale=0.7)
    run("plain", exact, scale=0.7)
    for each, wanted, before in zip(tensors, exact, untouched, strict=True):
        assert torch.equal(each.gradient, before)
        for found, fp32 in zip(
            (each.master, each.exp_avg, each.exp_avg_sq),
            (wanted.master, wanted.exp_avg, wanted.exp_avg_sq),
            strict=True,
        ):
            # bf16 has 8 bits: rounding up or down moves by less than one unit in the last.
            rtol = 1e-5 if found.dtype == F32 else 2**-7
            torch.testing.assert_close(found.float(), fp32, rtol=rtol, atol=5e-7)
        if each.copy is not None:
            assert torch.equal(each.copy, each.master.to(each.copy.dtype))


def decay_to(value: float, size: int, device: str, *, seed: int = 1) -> tuple[AdamTensors, AdamSettings]:
    """States of which one update makes a bf16 master of exactly `value` times one: the gradient is zero."""
    ones = torch.ones(size, device=device, dtype=BF16)
    zeros = torch.zeros(size, device=device)
    states = AdamTensors(ones, zeros, zeros.clone(), zeros.clone(), None, step=1, seed=seed)
    return states, replace(SETTINGS, lr=1.0, weight_decay=1 - value)


def mean_of_roundings(kernel: str) -> float:
    # bf16's numbers next to 1 - 2**-11 are 1, an eighth of the gap away, and 1 - 2**-8.
    size = GPU_BLOCK * (16 if kernel == "interpreter" else 64)
    states, settings = decay_to(1 - 2**-11, size, device_of(kernel))
    run(kernel, [states], settings)
    assert set(states.master.double().unique().tolist()) <= {1.0, 1 - 2**-8}
    return states.master.double().mean().item()


def unbiased(mean: float, samples: int) -> bool:
    """Within five standard deviations of a coin that falls down one time in eight, by 2**-8."""
    deviation = 2**-8 * (1 / 8 * 7 / 8 / samples) ** 0.5
    return abs(mean - (1 - 2**-11)) < 5 * deviation


@on_every_kernel
def test_stochastic_rounding_is_unbiased(kernel: str) -> None:
    assert unbiased(mean_of_roundings(kernel), GPU_BLOCK * 16)


def test_rounding_to_nearest_would_be_seen() -> None:
    nearest = torch.full((64,), 1 - 2**-11).bfloat16().double().mean().item()
    assert not unbiased(nearest, GPU_BLOCK * 16)


@on_every_kernel
def test_moments_are_rounded_without_bias_too_and_each_by_its_own_noise(kernel: str) -> None:
    size = GPU_BLOCK * 16
    device = device_of(kernel)
    ones = torch.ones(size, device=device, dtype=BF16)
    settings = AdamSettings(lr=0.0, beta1=1 - 2**-11, beta2=1 - 2**-11, eps=1.0, weight_decay=0.0)
    states = AdamTensors(ones.clone(), torch.zeros_like(ones), ones.clone(), ones.clone(), None, step=1, seed=5)
    run(kernel, [states], settings)
    assert unbiased(states.exp_avg.double().mean().item(), size)
    assert unbiased(states.exp_avg_sq.double().mean().item(), size)
    both = ((states.exp_avg < 1) & (states.exp_avg_sq < 1)).double().mean().item()
    assert both == pytest.approx(1 / 64, rel=0.2)  # with the same noise it would be 1/8
    assert torch.equal(states.master, ones)  # nothing to round


@on_every_kernel
def test_the_same_seed_gives_the_same_bits(kernel: str) -> None:
    def master(seed: int) -> Tensor:
        states, settings = decay_to(0.999, 5000, device_of(kernel), seed=seed)
        run(kernel, [states], settings)
        return states.master

    assert torch.equal(master(7), master(7))
    assert not torch.equal(master(7), master(8))
    if kernel != "plain":  # torch's own CPU generator sees half of the seed
        assert not torch.equal(master(7), master(7 + 2**40))


def test_noise_on_the_cpu_does_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = []
    for block in (64, 4096):
        monkeypatch.setattr(adam_cpu, "BLOCK", block)
        states, settings = decay_to(0.999, 5001, "cpu")
        adam([states], settings)
        masters.append(states.master)
    assert torch.equal(*masters)


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_on_the_cpu_do_not_depend_on_the_size_of_blocks(threads: int) -> None:
    """So each machine may have its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    results = []
    try:
        for block in (2**10, 2**12, 2**14, None):
            each = make(2**17 + 5, gradient=BF16)
            each = each._replace(copy=torch.empty_like(each.master, dtype=BF16))
            adam_cpu.update([each], SETTINGS, torch.tensor(0.3), None, block=block)
            results.append(each)
    finally:
        torch.set_num_threads(before)
    for each in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(each[:5], results[0][:5], strict=True))


@on_every_kernel
def test_values_that_are_no_numbers_stay_so(kernel: str) -> None:
    """A carry out of the NaN with all bits set, which GPUs make, would give zero."""
    device = device_of(kernel)
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, 0], dtype=torch.int32, device=device).view(F32)
    for clip_value in (None, 1.0):
        states = make(4, device=device, master=BF16, moments=BF16)._replace(gradient=nan.clone())
        run(kernel, [states], clip_value=clip_value)
        assert states.master.isnan().tolist() == [True, True, clip_value is None, False]
        assert states.exp_avg_sq.isnan().tolist() == [True, True, False, False]


@on_every_kernel
def test_addresses_need_no_alignment(kernel: str) -> None:
    device = device_of(kernel)
    size = GPU_BLOCK + 3
    for shift in (1, 2):
        whole = make(size + shift, device=device, gradient=BF16)
        each = AdamTensors(*(t[shift:] for t in whole[:4]), copy=None, step=3, seed=0)
        other = AdamTensors(*(t.clone() for t in each[:4]), copy=None, step=3, seed=0)
        run(kernel, [each])
        run(kernel, [other])
        assert_near(each, (other.master, other.exp_avg, other.exp_avg_sq), rtol=1e-6)


@on_every_kernel
def test_tensors_of_one_call_may_be_at_different_steps(kernel: str) -> None:
    tensors = [make(100, device=device_of(kernel))._replace(step=step) for step in (1, 2, 2)]
    expected = [by_torch(each, SETTINGS, each.gradient, fused=True) for each in tensors]
    run(kernel, tensors)
    for each, wanted in zip(tensors, expected, strict=True):
        assert_near(each, wanted, rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("prepare", [onepass.prepare, adam_triton.prepare])
def test_what_is_prepared_keeps_a_gradient_that_nobody_else_has(prepare: Callable[..., Launch]) -> None:
    """One that came up from the host. The kernel knows its address alone, which would be somebody else's by then."""
    tensors = make(10)
    gradient = weakref.ref(tensors.gradient)
    launch = prepare([tensors], SETTINGS, clip_value=None)
    del tensors
    assert gradient() is not None
    del launch
    assert gradient() is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_empty_tensors_are_skipped(device: str) -> None:
    each, other = make(5, device=device), make(5, device=device)
    adam([], SETTINGS)
    adam([make(0, device=device)], SETTINGS)
    adam([make(0, device=device), each], SETTINGS)
    adam([other], SETTINGS)
    assert torch.equal(each.master, other.master)


def test_parameters_that_require_gradients_are_updated_in_place() -> None:
    each, other = make(5), make(5)
    parameter = torch.nn.Parameter(each.master)
    adam([each._replace(master=parameter)], SETTINGS)
    adam([other], SETTINGS)
    assert torch.equal(parameter.detach(), other.master)
    assert parameter.is_leaf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient": torch.zeros(5)}, "gradient 0 has 5 elements, its master 4"),
        ({"exp_avg": torch.zeros(8)[::2]}, "exp_avg 0 of shape (4,) is not contiguous"),
        ({"exp_avg_sq": torch.zeros(4, dtype=F16)}, "exp_avg_sq 0 is torch.float16"),
        ({"copy": torch.zeros(4)}, "copy 0 is torch.float32"),
        ({"copy": torch.zeros(4, dtype=BF16, device="meta")}, "copy 0 is on meta"),
        ({"step": 0}, "the first update is step 1"),
        ({"seed": -1}, "seed -1 of tensors 0"),
    ],
)
def test_wrong_tensors_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        adam([make(4)._replace(**changes)], SETTINGS)
    assert message in str(error.value)


def test_wrong_clipping_is_named() -> None:
    with pytest.raises(ValueError, match="one fp32 number on cpu"):
        adam([make(4)], SETTINGS, scale=torch.ones(2))
    with pytest.raises(ValueError, match="clip_value=0"):
        adam([make(4)], SETTINGS, clip_value=0)


@needs_gpu
def test_the_host_never_waits_for_the_gpu() -> None:
    tensors = [make(size, device="cuda", gradient=BF16) for size in SIZES]
    scale = torch.tensor(0.5, device="cuda")
    adam(tensors, SETTINGS, scale=scale)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        adam(tensors, SETTINGS, scale=scale, clip_value=None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
