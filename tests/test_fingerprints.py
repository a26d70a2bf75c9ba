"""Fingerprints of tensors, and replicas that are compared by them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from zerofold.fingerprints import combine, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.bool, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fingerprint_does_not_depend_on_the_cut(dtype: torch.dtype) -> None:
    whole = (torch.randn(50, 31) * 10).to(dtype)
    flat = whole.reshape(-1)
    for bounds in ([0, 1550], [0, 1, 1550], [0, 400, 401, 401, 1550]):
        pieces = [fingerprint(flat[low:high], low) for low, high in pairwise(bounds)]
        assert combine(*pieces) == fingerprint(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_flipped_bit_and_every_swap_is_seen(dtype: torch.dtype) -> None:
    whole = (torch.randn(40) * 10).to(dtype)
    before = fingerprint(whole)
    data = whole.view(torch.uint8)
    for place in range(data.numel()):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert fingerprint(whole) != before
            data[place] ^= 1 << bit
    swapped = whole.clone()
    swapped[[3, 30]] = whole[[30, 3]]
    assert fingerprint(swapped) != before
    assert fingerprint(whole) == before


def test_long_tensors_go_through_in_chunks() -> None:
    whole = torch.randn(2**20 * 2 + 5)
    cut = 2**20 + 3
    assert fingerprint(whole) == combine(fingerprint(whole[:cut]), fingerprint(whole[cut:], cut))
    assert 0 <= fingerprint(whole) < 2**64
