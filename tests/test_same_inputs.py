"""Ranks of a tensor axis do the same in every step, forwards of the same inputs above all, or all say who does not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import raised
from torch import Tensor, nn

import zerofold as zf
from zerofold.groups import make_control, make_model_group
from zerofold.parallel.alike import SameInputs
from zerofold.train.gpt import GPT, GPTConfig

WORDS, TOKENS, LATE = 16, 8, 2


def make(is_prepared: bool) -> tuple[zf.Mesh, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh, model = zf.mesh(tensor=2, device="cpu"), GPT(GPTConfig(layers=2, hidden=16, heads=2, seq=TOKENS, vocab=WORDS))
    zf.tensor_parallel(model, mesh)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_prepared:
        model, optimizer = zf.prepare(model, optimizer, stage=1, mesh=mesh)
    return mesh, model, optimizer


def batch(step: int) -> Tensor:
    return torch.randint(0, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(step))


def forward(model: nn.Module, way: str, step: int) -> Tensor:
    """In step number LATE the last rank does something else."""
    is_odd, tokens = step == LATE and dist.get_rank() > 0, batch(step)
    if is_odd and way == "shape":
        tokens = tokens[:, :6]
    if is_odd and way == "dtype":
        tokens = tokens.int()
    if is_odd and way == "values":
        tokens = batch(step + 1)
    if is_odd and way == "evaluation":
        model.eval()
        with torch.no_grad():
            return model(tokens).square().mean()
    return model(tokens).square().mean()


def train(way: str, is_prepared: bool) -> tuple[str, list[float]]:
    """What was said in step LATE, and the losses of all steps; that one is done again."""
    _, model, optimizer = make(is_prepared)
    losses, said = [], ""
    for step in range(LATE + 2):
        if step == LATE:
            start = time.monotonic()
            said = raised(forward, model, way, step)
            assert time.monotonic() - start < 10
            model.train()
        loss = forward(model, "alike", step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if is_prepared:
        zf.close(model)
    return said, losses


WAYS = {
    "shape": "got different inputs: rank 0 has (2, 8) torch.int64, rank 1 has (2, 6) torch.int64; give them the same",
    "dtype": "got different inputs: rank 0 has (2, 8) torch.int64, rank 1 has (2, 8) torch.int32; give them the same",
    "values": "got different inputs: rank 1 has other values in its (2, 8) torch.int64 than rank 0; give them the same",
    "evaluation": "are at different forwards: rank 0 is in training with gradients, rank 1 in evaluation without",
}


@pytest.mark.parametrize(("way", "is_prepared"), [*((way, True) for way in WAYS), ("shape", False)])
def test_a_rank_that_is_given_something_else_later_is_named_on_all(ranks: Any, way: str, is_prepared: bool) -> None:
    found = ranks(2, train, way, is_prepared)
    for said, losses in found:
        assert said.startswith("ValueError: ranks 0, 1 share the inside of every layer and ")
        assert WAYS[way] in said
        assert losses == found[0][1]


def look_at_values_on_a_device() -> list[str]:
    """What is said before each of four forwards, of which rank 1 gets something else in the third."""
    mesh, model = zf.mesh(tensor=2, device="cpu"), nn.Linear(4, 4)
    comm = make_model_group(mesh.groups("tensor"), make_control(None, overlap=False))
    assert comm is not None
    compared, said = SameInputs(model, mesh.along("tensor"), comm), []
    compared.at_hand = ()  # as of a GPU's
    for step in range(LATE + 3):
        x = torch.full((2, 4), float(step))
        try:
            model(x + 1 if step == LATE and dist.get_rank() else x)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_values_on_a_device_are_told_with_the_next_forward(ranks: Any) -> None:
    for *before, said, after in ranks(2, look_at_values_on_a_device):
        assert before == [""] * (LATE + 1)
        assert "rank 1 has other values in its (2, 4) torch.float32 than rank 0 in the forward before this one" in said
        assert not after


def checkpoint_alone() -> None:
    mesh, model, optimizer = make(is_prepared=True)
    for step in range(3):
        if step == 1 and dist.get_rank():
            zf.checkpoint_blocks(model, partition=mesh)
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_blocks_checkpointed_in_parts_by_one_rank_alone_are_named_on_all(ranks: Any) -> None:
    start = time.monotonic()
    for error in ranks(2, checkpoint_alone, expect_error=True):
        assert error.startswith("DivergenceError: "), error
        assert "rank 1 waits in all_gather of 'checkpoint_blocks(partition=)'" in error
        assert "rank 0 waits in all_reduce of 'inputs of a forward'" in error
    assert time.monotonic() - start < 30


def step_alone() -> None:
    """Each rank of the tensor axis has a whole data axis of its own: nobody else watches them."""
    _, model, optimizer = make(is_prepared=True)
    model(batch(0)).square().mean().backward()
    if dist.get_rank():
        optimizer.step()
    model(batch(1))


def test_a_call_of_one_tensor_rank_alone_is_named_on_all(ranks: Any) -> None:
    for error in ranks(2, step_alone, expect_error=True):
        assert error.startswith("DivergenceError: "), error
        assert "gradient norm" in error


def checkpoint_otherwise(mine: dict[str, Any]) -> str:
    mesh, model, _ = make(is_prepared=True)
    said = raised(zf.checkpoint_blocks, model, partition=mesh, **(mine if dist.get_rank() else {}))
    zf.checkpoint_blocks(model, partition=mesh).remove()
    zf.close(model)
    return said


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ({"every": 2}, "rank 0 asks for every=1, keep='device'"),
        ({"every": 0}, "every=0: give the number of blocks per checkpoint"),
    ],
)
def test_blocks_in_parts_are_asked_for_alike(ranks: Any, mine: dict[str, Any], said: str) -> None:
    for message in ranks(2, checkpoint_otherwise, mine):
        assert said in message
