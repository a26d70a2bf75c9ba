"""`zf.mesh`: who talks to whom; and norms over a model that several ranks hold between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import raised
from torch import nn

import zerofold as zf
from zerofold.part import Part, set_part


def describe(**sizes: int) -> tuple[str, dict[str, int]]:
    made = zf.mesh(device="cpu", **sizes)
    return str(made), made.coordinate


def test_a_mesh_says_who_talks_to_whom(ranks: Any) -> None:
    text, first = ranks(8, describe, tensor=2, pipeline=2)[0]
    assert first == {"pipeline": 0, "replicate": 0, "data": 0, "tensor": 0}
    lines = text.splitlines()
    assert lines[0] == "8 ranks: pipeline 2 x data 2 x tensor 2"
    found = {line.split()[0]: line.split("  ")[-1].strip() for line in lines[2:]}
    assert found == {
        "pipeline": "0 4 | 1 5 | 2 6 | 3 7",
        "data": "0 2 | 1 3 | 4 6 | 5 7",
        "tensor": "0 1 | 2 3 | 4 5 | 6 7",
    }


def refuse(**sizes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        zf.mesh(device="cpu", **sizes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"data": 2, "tensor": 3}, "data 2 x tensor 3 does not make 4 ranks"),
        ({"tensor": 3}, "choose axes whose product divides 4"),
        ({"data": 3, "tensor": 2}, "leave data out to get 2"),
        ({"tensor": 0}, "tensor=0 must be a number of ranks"),
        ({"pipeline": 1.5}, "pipeline=1.5 must be"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_a_way_out(ranks: Any, sizes: dict[str, Any], said: str) -> None:
    assert said in ranks(4, refuse, **sizes)[0]


def norms(stage: int) -> tuple[float, float]:
    """A weight of which each rank of the tensor axis has the half, and a bias that both hold alike."""
    torch.manual_seed(0)
    whole = nn.Linear(6, 4)
    spread = zf.mesh(tensor=2, device="cpu")
    index = spread.coordinate["tensor"]
    half = nn.Linear(6, 2)
    half.weight.data = whole.weight.data[2 * index : 2 * index + 2].clone()
    half.bias = nn.Parameter(whole.bias.data.clone())
    set_part(half.weight, Part(whole.weight.shape, 0, 2 * index, 2 * index + 2, counts=True))
    set_part(half.bias, Part(whole.bias.shape, None, 0, 4, counts=index == 0))
    half.forward = lambda x: (x @ half.weight.t()).sum() + half.bias.sum()  # type: ignore[method-assign]
    zf.prepare(half, torch.optim.SGD(half.parameters(), lr=0.1), stage=stage, mesh=spread)
    x = torch.ones(3, 6) * (1 + spread.coordinate["data"])
    half(x).backward()
    (x.mul(1.5 / x[0, 0]) @ whole.weight.t()).sum().add(whole.bias.sum()).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None])
    got = zf.clip_grad_norm_(half, 1.0)
    zf.close(half)
    return float(got), float(expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_norm_counts_every_part_once(ranks: Any, stage: int) -> None:
    for got, expected in ranks(4, norms, stage):
        assert got == pytest.approx(expected, rel=1e-6)


def mesh_of_one_s_own() -> str:
    return raised(zf.mesh, device="cpu", **({"tensor": 2} if dist.get_rank() else {"data": 2}))


def test_ranks_that_ask_for_different_meshes_are_told(ranks: Any) -> None:
    said = "rank 0 asks for pipeline 1 x replicate 1 x data 2 x tensor 1, rank 1 for pipeline 1 x replicate 1 x data 1"
    assert all(said in found for found in ranks(2, mesh_of_one_s_own))


@pytest.mark.parametrize("device", ["gpu", 3, "cpu:0"])
def test_a_device_that_is_none_is_refused(ranks: Any, device: Any) -> None:
    (said,) = ranks(1, raised, zf.mesh, device=device)
    assert said == f"ValueError: device={device!r} must be a kind of device, 'cuda' or 'cpu', or left out to find one"
