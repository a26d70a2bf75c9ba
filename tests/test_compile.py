"""torch.compile on prepared models: the same results, one graph for all equal blocks, and no hook inside a graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import Block, TinyGPT, batches, largest_difference, make_model
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.nn import functional as F

import zerofold as zf
from zerofold.units import find_units

# What is compiled, and whether before or after zf.prepare.
BLOCKS_IN_PLACE = ("blocks in place, before", "blocks in place, after")
BLOCKS_WRAPPED = ("blocks wrapped, before", "blocks wrapped, after")
WHOLE = ("model in place, after", "model wrapped, before", "model wrapped, after")

HAS_COMPILER = any(shutil.which(name) for name in ("g++", "c++", "clang++"))


class UnrolledGPT(TinyGPT):
    """Calls its blocks one by one: torch.compile gives up a whole frame for a graph break in a loop, not for these."""

    def forward(self, indices: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(indices) + self.positions(torch.arange(indices.shape[1], device=indices.device))
        x = self.blocks[0](x)
        x = self.blocks[1](x)
        x = self.blocks[2](x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.reshape(-1))


@dataclass
class Run:
    weights: list[Tensor]
    losses: list[float]
    graphs: list[int]  # compiled up to each step
    traced_hooks: list[str]  # functions of zerofold that torch.compile looked into


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return aot_eager(graph, inputs)


def compile_as(way: str, model: nn.Module, when: str, **options: Any) -> nn.Module:
    """The model to call, with what `way` names compiled if it is time."""
    what, _, its_time = way.partition(", ")
    if its_time != when:
        return model
    if what == "model wrapped":
        return torch.compile(model, **options)  # type: ignore[return-value]
    if what == "model in place":
        model.compile(**options)
        return model
    for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
        if what == "blocks in place":
            block.compile(fullgraph=True, **options)  # raises where a block is not one graph
        else:
            model.blocks[index] = torch.compile(block, fullgraph=True, **options)  # type: ignore[index,operator]
    return model


def train(
    way: str, stage: int, *, unrolled: bool = False, backend: Any = None, evaluations: int = 2, **settings: Any
) -> Run:
    """Three steps, the first ones followed by an evaluation."""
    torch.compiler.reset()
    clear_compilation_metrics()
    backend = backend or Counting()
    model_options = settings.pop("model_options", {})
    model: nn.Module = make_model(**model_options)
    if unrolled:
        torch.manual_seed(1)
        model = UnrolledGPT(**model_options)
    model = compile_as(way, model, "before", backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, units=Block, **settings)
    model = compile_as(way, model, "after", backend=backend)

    def forward_backward(*batch: Tensor) -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        return loss.detach()

    if way == "step":
        forward_backward = torch.compile(forward_backward, backend=backend)
    losses, graphs = [], []
    for number, batch in enumerate(batches(3)):
        losses.append(forward_backward(*batch).item())
        optimizer.step()
        optimizer.zero_grad()
        if number < evaluations:
            model.eval()
            with torch.no_grad():
                losses.append(model(*batch).item())
            model.train()
        graphs.append(getattr(backend, "graphs", 0))
    with zf.full_params(model):
        weights = [p.detach().clone() for p in model.parameters()]
    zf.close(model)
    ours = str(Path(zf.__file__).parent)
    traced = [m.co_name or "?" for m in get_compilation_metrics() if (m.co_filename or "").startswith(ours)]
    return Run(weights, losses, graphs, traced)


def against_eager(ways: tuple[str, ...], stage: int, **settings: Any) -> dict[str, tuple[bool, list[int], list[str]]]:
    """Per way: whether weights and losses are eager's to the bit, graphs by step, hooks that were traced."""
    eager = train("nothing", stage, **settings)
    found = {}
    for way in ways:
        run = train(way, stage, **settings)
        same = largest_difference(eager.weights, run.weights) == 0.0 and eager.losses == run.losses
        found[way] = (same, run.graphs, run.traced_hooks)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_blocks_share_one_graph_and_change_no_bit(ranks: Any, stage: int) -> None:
    ways = BLOCKS_IN_PLACE + BLOCKS_WRAPPED if stage == 3 else (BLOCKS_IN_PLACE[0],)
    for per_way in ranks(2, against_eager, ways, stage, model_options={"layers": 4}):
        assert per_way == dict.fromkeys(ways, (True, [2, 2, 2], []))  # one to train, one to evaluate


@pytest.mark.parametrize("checkpoint", ["reentrant", "non_reentrant"])
def test_compiled_blocks_under_activation_checkpointing(ranks: Any, checkpoint: str) -> None:
    ways = (BLOCKS_IN_PLACE[0], BLOCKS_WRAPPED[0])
    # A reentrant checkpoint runs its first forward without gradients, in training mode: a third kind of call.
    graphs = 3 if checkpoint == "reentrant" else 2
    for per_way in ranks(2, against_eager, ways, 3, model_options={"layers": 4, "checkpoint": checkpoint}):
        assert per_way == dict.fromkeys(ways, (True, [graphs] * 3, []))


def test_a_model_compiled_whole_breaks_at_its_units(ranks: Any) -> None:
    counts = set()
    for layers, ways in ((2, WHOLE), (5, WHOLE[:1])):
        for per_way in ranks(2, against_eager, ways, 3, model_options={"layers": layers}):
            for same, graphs, traced in per_way.values():
                assert same
                assert not traced
                assert graphs[0] == graphs[-1]
                counts.add(graphs[0])
    assert len(counts) == 1  # one graph for all blocks, however many; the rest are of the root's own modules


def test_where_parameters_are_whole_only_units_break_the_graph(ranks: Any) -> None:
    ways = WHOLE[2:]
    for per_way in ranks(2, against_eager, ways, 1, unrolled=True):
        assert per_way == dict.fromkeys(ways, (True, [6, 6, 6], []))  # embeddings, block, loss; train and evaluate


def test_backward_inside_a_compiled_function_traces_no_hook(ranks: Any) -> None:
    for per_way in ranks(2, against_eager, ("step",), 3):
        same, graphs, traced = per_way["step"]
        assert same
        assert not traced
        assert graphs[0] == graphs[-1]


def inductor_against_eager() -> tuple[float, float]:
    """The largest difference of a weight and of a loss."""
    # The gradient of a key bias is rounding noise, and every fused kernel rounds in its own way.
    settings: dict[str, Any] = {"model_options": {"key_bias": False}, "evaluations": 0}  # each graph costs seconds
    eager, run = train("nothing", 3, **settings), train(BLOCKS_IN_PLACE[0], 3, backend="inductor", **settings)
    losses = max(abs(a - b) for a, b in zip(eager.losses, run.losses, strict=True))
    return largest_difference(eager.weights, run.weights), losses


@pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a C++ compiler")
def test_inductor_stays_close_to_eager(ranks: Any) -> None:
    for weights, losses in ranks(2, inductor_against_eager):
        assert weights <= 1e-5
        assert losses <= 1e-5


PICKS: dict[str, Any] = {
    "repeated": None,
    "class": Block,
    "predicate": lambda name, module: isinstance(module, Block),
    "size": 15_000,
}


@pytest.mark.parametrize("choice", PICKS.values(), ids=PICKS)
def test_the_wrapper_is_the_unit(choice: Callable[..., Any]) -> None:
    model = make_model()
    plain = list(find_units(model, choice))
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block)  # type: ignore[assignment]
    assert list(find_units(model, choice)) == plain == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(find_units(torch.compile(model), choice).values()) == list(model.blocks)  # type: ignore[arg-type]
