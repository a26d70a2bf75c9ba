"""What a pipeline would train wrongly without a word is refused; gradients survive what is done between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.pipeline_models import VOCABULARY, batch, loss_fn, make, optimizer, own, train_alone
from tests.ranks import raised
from torch import Tensor, nn

import zerofold as zf
from zerofold.parallel.stand_ins import BlockStandIn, Course, Reached

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor | None = None, *, view: bool = False) -> Tensor:
        x = torch.tanh(self.linear(x))
        if view:
            return (x * 2).flatten().view(x.shape)
        return x if condition is None else x + condition


class Wayward(nn.Module):
    """Plain, or with one way in which more than the stream goes from block to block."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        if way == "shared":
            self.layers[3].linear.weight = self.layers[0].linear.weight
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = start = self.project(self.embedding(tokens))
        if self.way == "module at both ends":
            x = self.norm(x)
        every = []
        layers = list(self.layers)
        if self.way == "another order":
            layers.reverse()
        if self.way == "one left out":
            layers = layers[:2] + layers[3:]
        if self.way == "one twice":
            layers.append(layers[-1])
        for layer in layers:
            if self.way == "residual":
                x = x + layer(x)
            elif self.way == "views":
                x = layer(x, view=True)
            elif self.way == "in place":
                x = layer(x).mul_(0.5)
            else:
                x = layer(x, start if self.way == "side input" else None)
            every.append(x)
        if self.way == "skip":
            x = x + start
        if self.way == "every block":
            x = torch.stack(every).sum(0)
        return self.head(self.norm(x))


def cut(way: str, **options: Any) -> None:
    zf.pipeline(Wayward(way), zf.mesh(pipeline=2, device="cpu"), microbatches=2, loss_fn=loss_fn, **options)


REFUSED = {
    "residual": "'layers.1' is not given what the block before it returns",
    "in place": "'layers.1' is not given what the block before it returns",
    "side input": "'layers.1' is given a tensor of shape (1, 2, 8) beside the stream",
    "skip": "what the model returns depends on more than the last block's output",
    "every block": "what the model returns depends on more than the last block's output",
    "module at both ends": "'norm' has parameters and is called before the blocks and after them",
    "another order": "the model calls 'layers.3' where 'layers.0' is next in its list of blocks",
    "one left out": "the model's forward calls 'layers.2' 0 times: every block must be called once",
    "one twice": "the model's forward calls 'layers.3' 2 times: every block must be called once",
    "shared": "'layers.0.linear.weight' is also 'layers.3.linear.weight', in a block of another stage",
}


@pytest.mark.parametrize("way", REFUSED)
def test_a_model_that_hands_on_more_than_the_stream_is_refused(ranks: Any, way: str) -> None:
    for message in ranks(2, raised, cut, way):
        assert message.startswith("ValueError: pipeline: ")
        assert REFUSED[way] in message


def test_the_same_model_without_it_is_taken(ranks: Any) -> None:
    ranks(2, cut, "plain")


def test_what_blocks_hand_on_besides_the_stream_is_named() -> None:
    """As T5's do: the first one makes a position bias for all. On the next stage it would be missing."""
    stand_in = BlockStandIn("layers.1", Layer(), 1, Course(stop=1))
    stream, bias = torch.ones(2, WIDTH), torch.ones(WIDTH, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"'layers.1' is given a tensor of shape \(8,\) that blocks of an earlier stage"
    ):
        stand_in(stream, position_bias=bias * 2)
    with pytest.raises(Reached):
        stand_in(stream, mask=torch.ones(WIDTH))


def call(way: str) -> None:
    mesh = zf.mesh(pipeline=2, device="cpu")
    model = make("gpt")
    pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=loss_fn)
    zf.shard(pipe, mesh=mesh)
    tokens, target = batch(dist.get_rank() if way == "batches" else 0)
    try:
        model(tokens) if way == "model" else pipe.step(tokens, target=target)
    finally:
        zf.close(model)


def test_other_samples_on_every_stage_are_told(ranks: Any) -> None:
    for message in ranks(2, raised, call, "batches"):
        assert "ranks 0, 1 are stages of one pipeline and got different batches" in message


def test_the_model_itself_cannot_be_called(ranks: Any) -> None:
    for message in ranks(2, raised, call, "model"):
        assert "so the model cannot be called by itself: use pipe.step" in message


def norm_of(model: nn.Module) -> float:
    return zf.clip_grad_norm_(model, float("inf")).item()


def reference_norm(kind: str, *steps: int) -> float:
    model = make(kind)
    for step in steps:
        loss_fn(model(batch(step)[0]), batch(step)[1]).backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


def place_twice() -> tuple[list[float], float]:
    mesh = zf.mesh(pipeline=2, device="cpu")
    model = make("gpt")
    pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=loss_fn, schedule="zero_bubble")
    norms = []
    for _ in range(2):
        zf.shard(pipe, stage=2, mesh=mesh)
        pipe.step(batch(0)[0], target=batch(0)[1])
        norms.append(norm_of(model))
        zf.close(model)
    return norms, reference_norm("gpt", 0)


def test_a_model_that_is_closed_and_placed_anew_loses_no_gradients(ranks: Any) -> None:
    for norms, expected in ranks(2, place_twice):
        assert norms == pytest.approx([expected, expected], rel=1e-5)


def add_up_in_reserved_memory() -> tuple[float, float]:
    mesh = zf.mesh(pipeline=2, device="cpu")
    model = make("gpt2")  # whose head is its embedding
    pipe = zf.pipeline(model, mesh, microbatches=2, loss_fn=loss_fn)
    zf.shard(pipe, stage=0, mesh=mesh, contiguous_gradients=True)
    for step in range(2):
        tokens, target = own(mesh, *batch(step))
        pipe.step(tokens, target=target)
    norm = norm_of(model)
    zf.close(model)
    return norm, reference_norm("gpt2", 0, 1)


def test_tied_gradients_add_up_in_reserved_memory(ranks: Any) -> None:
    for norm, expected in ranks(4, add_up_in_reserved_memory):
        assert norm == pytest.approx(expected, rel=1e-5)


def train_on_parts_of_the_sequence(schedule: str, kind: str) -> tuple[list[float], list[float]]:
    mesh = zf.mesh(pipeline=2, tensor=2, device="cpu")
    model = zf.tensor_parallel(make(kind), mesh, sequence_parallel=True)
    pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=loss_fn, schedule=schedule)
    pipe, stepper = zf.prepare(pipe, optimizer(pipe.parameters()), stage=1, mesh=mesh, clip=0.5)
    losses = []
    for step in range(3):
        losses.append(pipe.step(batch(step)[0], target=batch(step)[1]).item())
        stepper.step()
        stepper.zero_grad()
    zf.close(model)
    return losses, train_alone(make(kind), 3, 0.5)[0]


# In zbv one rank has the first stage and the last.
@pytest.mark.parametrize(("schedule", "kind"), [("1f1b", "gpt"), ("zbv", "gpt"), ("1f1b", "mixtral")])
def test_parts_of_the_sequence_pass_from_stage_to_stage(ranks: Any, schedule: str, kind: str) -> None:
    for losses, expected in ranks(4, train_on_parts_of_the_sequence, schedule, kind):
        assert losses == pytest.approx(expected, abs=1e-5)


def stages_that_differ(options: dict[str, Any]) -> str:
    mesh, model = zf.mesh(pipeline=2, device="cpu"), make("gpt")
    mine = options if dist.get_rank() else {}
    pipe = zf.pipeline(model, mesh, **{"microbatches": 2, "schedule": "gpipe", "loss_fn": loss_fn} | mine)
    zf.prepare(pipe, optimizer(pipe.parameters()), stage=1, mesh=mesh)
    tokens, target = batch(0)
    said = raised(pipe.step, tokens, target=target)
    zf.close(pipe.model, gather=False)
    return said


@pytest.mark.parametrize("options", [{"microbatches": 4}, {"schedule": "1f1b"}])
def test_ranks_that_cut_a_pipeline_differently_are_told(ranks: Any, options: dict[str, Any]) -> None:
    for said in ranks(2, stages_that_differ, options):
        assert "rank 0 has '2 stages, 2 micro-batches, schedule gpipe', rank 1 '2 stages, " in said


def placed_on_another_mesh(data: int | None) -> str:
    mesh, model = zf.mesh(pipeline=2, device="cpu"), make("gpt")
    pipe = zf.pipeline(model, mesh, microbatches=2, loss_fn=loss_fn)
    other = None if data is None else zf.mesh(data=data, device="cpu")
    return raised(zf.prepare, pipe, optimizer(pipe.parameters()), stage=1, mesh=other)


@pytest.mark.parametrize("data", [None, 2])
def test_stages_need_the_mesh_that_they_were_cut_for(ranks: Any, data: int | None) -> None:
    for said in ranks(2, placed_on_another_mesh, data):
        assert "zf.pipeline has cut this GPT over pipeline=2 ranks" in said
        assert "pass the zf.mesh with which it was cut" in said


def train_blocks_that_return_views(schedule: str) -> tuple[list[float], list[float]]:
    mesh = zf.mesh(pipeline=2, device="cpu")
    model, chunks = Wayward("views"), None if schedule == "1f1b" else 2  # so that there are stages in the middle
    pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=loss_fn, schedule=schedule, chunks_per_rank=chunks)
    pipe, stepper = zf.prepare(pipe, optimizer(pipe.parameters()), stage=1, mesh=mesh, clip=0.5)
    losses = []
    for step in range(3):
        losses.append(pipe.step(batch(step)[0], target=batch(step)[1]).item())
        stepper.step()
        stepper.zero_grad()
    zf.close(model)
    return losses, train_alone(Wayward("views"), 3, 0.5)[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_blocks_may_return_views(ranks: Any, schedule: str) -> None:
    for losses, expected in ranks(2, train_blocks_that_return_views, schedule):
        assert losses == pytest.approx(expected, abs=1e-5)


def place_with_an_optimizer_from_before() -> str:
    mesh, model = zf.mesh(pipeline=2, device="cpu"), make("gpt")
    early = optimizer(model.parameters())
    return raised(zf.prepare, zf.pipeline(model, mesh, microbatches=2, loss_fn=loss_fn), early, stage=1, mesh=mesh)


def test_the_optimizer_comes_after_the_pipeline(ranks: Any) -> None:
    for said in ranks(2, place_with_an_optimizer_from_before):
        assert "parameters are not of this rank's stage" in said
        assert "build the optimizer after it, on pipe.parameters()" in said


def switch_on(way: str, model: Any) -> Any:
    """Checkpoints; what switches them off again. Hugging Face's on one rank, in whose stages they are."""
    if way == "blocks":
        return zf.checkpoint_blocks(model, use_reentrant=True).remove
    if way == "policy":
        return zf.checkpoint_blocks(model, policy=[torch.ops.aten.mm.default]).remove
    if dist.get_rank():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model.gradient_checkpointing_disable


def step_with_checkpoints(schedule: str, way: str, before: int) -> tuple[str, list[float], list[float]]:
    """What the last of these steps is refused for; then it is taken without."""
    kind, losses, said = "llama" if way == "hugging face" else "gpt", [], ""
    mesh, model = zf.mesh(pipeline=2, device="cpu"), make(kind)
    pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=loss_fn, schedule=schedule)
    pipe, stepper = zf.prepare(pipe, optimizer(pipe.parameters()), stage=1, mesh=mesh, clip=0.5)
    for step in range(before + 1):
        tokens, target = batch(step)
        if step == before:
            switch_off = switch_on(way, model)
            said = raised(pipe.step, tokens, target=target)
            switch_off()
        losses.append(pipe.step(tokens, target=target).item())
        stepper.step()
        stepper.zero_grad()
    zf.close(model)
    return said, losses, train_alone(make(kind), before + 1, 0.5)[0]


@pytest.mark.parametrize(
    ("schedule", "way", "before"),
    [
        ("zero_bubble", "blocks", 0),
        ("zbv", "blocks", 0),
        ("zero_bubble", "blocks", 2),
        ("zbv", "hugging face", 1),
        ("zero_bubble", "policy", 1),
    ],
)
def test_checkpoints_that_allow_no_split_backward_are_refused(ranks: Any, schedule: str, way: str, before: int) -> None:
    made_with = "policy=" if way == "policy" else "use_reentrant=True"
    fix = "leave it out" if way == "policy" else "pass use_reentrant=False"
    for said, losses, expected in ranks(2, step_with_checkpoints, schedule, way, before):
        assert f"has checkpoints with {made_with}, whose backward cannot be split" in said
        assert f"{fix}, or use schedule='1f1b'" in said
        assert losses == pytest.approx(expected, abs=1e-5)


def cut_after_grouping(every: int) -> str:
    """Four blocks: three on the first stage."""
    mesh, model = zf.mesh(pipeline=2, device="cpu"), make("gpt")
    zf.checkpoint_blocks(model, every=every)
    zf.pipeline(model, mesh, microbatches=2, loss_fn=loss_fn, split=["blocks.3"])
    return "cut"


def test_a_group_of_checkpointed_blocks_on_two_stages_is_refused(ranks: Any) -> None:
    assert ranks(2, cut_after_grouping, 1) == ["cut"] * 2
    for said in ranks(2, raised, cut_after_grouping, 2):
        assert "'blocks.2' is checkpointed together with a block of another stage" in said
        assert "call zf.checkpoint_blocks after zf.pipeline, or with every=1" in said


class Rows(nn.Module):
    """Blocks without a class of their own, of which two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(4))
        self.rows[3][0].weight = self.rows[0][0].weight


def cut_rows() -> None:
    zf.pipeline(Rows(), zf.mesh(pipeline=2, device="cpu"), microbatches=2, loss_fn=loss_fn, example=(torch.ones(2, 4),))


def test_a_weight_that_keeps_blocks_from_being_a_row_is_named(ranks: Any) -> None:
    for said in ranks(2, raised, cut_rows):
        assert "'rows.3.0.weight' is also 'rows.0.0.weight'" in said
