"""Tensor parallelism, pipelines and ZeRO together: 2 x 2 x 2 ranks train as one process does, and so does each pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import zerofold as zf
from ranks import raised
from zerofold.train.gpt import GPT, GPTConfig

STEPS, SAMPLES, SEQUENCE, WORDS = 10, 8, 8, 32
CLIP = 0.5  # below every norm here: it binds in every step
CUBE = {"data": 2, "tensor": 2, "pipeline": 2}
Sizes = dict[str, int]


def gpt() -> nn.Module:
    return GPT(GPTConfig(layers=4, hidden=16, heads=2, seq=SEQUENCE, vocab=WORDS))


def gpt2() -> nn.Module:
    """Its head is its embedding."""
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    small = {"vocab_size": WORDS, "n_positions": SEQUENCE, "n_embd": 16, "n_layer": 4, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **drop))


def llama() -> nn.Module:
    small = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": SEQUENCE}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **heads, use_cache=False))


MODELS = {"gpt": gpt, "gpt2": gpt2, "llama": llama}
LLAMA_PLAN = {
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel,
    "model.layers.*.self_attn.o_proj": RowwiseParallel,
    "model.layers.*.mlp.gate_proj": ColwiseParallel,
    "model.layers.*.mlp.up_proj": ColwiseParallel,
    "model.layers.*.mlp.down_proj": RowwiseParallel,
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(5)
    model = MODELS[kind]().train()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.mul_(8)  # of 0.02, which a norm would blow up, and rounding with it
    return model


def on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[kind]().train()


def adamw(parameters: Any) -> torch.optim.AdamW:
    # eps: some gradients are pure noise, of which Adam would make full-sized steps.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    starts = torch.randint(0, WORDS, (SAMPLES, 1), generator=generator)
    data = (starts + 5 * torch.arange(SEQUENCE + 1)) % WORDS  # something to learn: losses fall
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def loss_fn(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@cache
def alone(kind: str) -> tuple[list[float], list[float]]:
    """Losses and norms of plain torch on whole batches."""
    model = made(kind)
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        tokens, target = batch(step)
        loss = loss_fn(model(tokens), target)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


class Spread:
    """A model over a mesh, put together as a user would."""

    def __init__(
        self,
        kind: str,
        sizes: Sizes,
        stage: Any,
        *,
        first: str = "tensor",
        schedule: str = "1f1b",
        keep: str | None = None,
        load: str | None = None,
        **wishes: Any,
    ) -> None:
        """`load`: the model is on the meta device before, and takes its weights from there."""
        torch.set_num_threads(1)
        self.mesh = zf.mesh(device="cpu", **sizes)
        self.model, self.pipe = made(kind) if load is None else on_meta(kind), None
        if first == "tensor":
            zf.tensor_parallel(self.model, self.mesh, **wishes)
        if self.mesh.pipeline > 1:
            self.pipe = zf.pipeline(self.model, self.mesh, microbatches=4, loss_fn=loss_fn, schedule=schedule)
        if first == "pipeline":
            zf.tensor_parallel(self.model, self.mesh, **wishes)
        placed: Any = self.pipe or self.model
        optimizer, device = adamw(placed.parameters()), None if load is None else "cpu"
        _, self.optimizer = zf.prepare(
            placed, optimizer, mesh=self.mesh, stage=stage, clip=CLIP, load=load, device=device
        )
        if keep is not None:
            zf.checkpoint_blocks(self.model, keep=keep, partition=self.mesh)

    def losses(self, start: int, stop: int) -> tuple[list[float], list[float]]:
        """And norms, of these steps."""
        losses, norms = [], []
        for step in range(start, stop):
            tokens, target = (t.chunk(self.mesh.data)[self.mesh.coordinate["data"]] for t in batch(step))
            if self.pipe is not None:
                loss = self.pipe.step(tokens, target=target)
            else:
                loss = loss_fn(self.model(tokens), target)
                loss.backward()
            self.optimizer.step()
            norms.append(zf.last_step(self.model).norm)
            self.optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
        return losses, norms


def trained(kind: str, sizes: Sizes, stage: Any, **how: Any) -> tuple[list[float], list[float]]:
    spread = Spread(kind, sizes, stage, **how)
    found = spread.losses(0, STEPS)
    zf.close(spread.model)
    return found


def assert_as_one_process(found: list[tuple[list[float], list[float]]], kind: str, start: int = 0) -> None:
    losses, norms = alone(kind)
    assert min(norms) > CLIP
    for got, got_norms in found:
        assert got == pytest.approx(losses[start:], abs=1e-5)
        assert got_norms == pytest.approx(norms[start:], rel=1e-5)


@pytest.mark.parametrize("stage", [3, 0, 1, 2])
def test_the_cube_trains_as_one_process_does(ranks: Any, stage: int) -> None:
    assert_as_one_process(ranks(8, trained, "gpt", CUBE, stage), "gpt")


@pytest.mark.parametrize("stage", [3, 0, 1, 2])
@pytest.mark.parametrize("axes", [("data", "tensor"), ("data", "pipeline"), ("tensor", "pipeline")], ids="-".join)
def test_each_pair_of_axes_trains_as_one_process_does(ranks: Any, axes: tuple[str, str], stage: int) -> None:
    assert_as_one_process(ranks(4, trained, "gpt", dict.fromkeys(axes, 2), stage), "gpt")


@pytest.mark.parametrize(
    "wishes", [{"sequence_parallel": True}, {"loss_parallel": True}], ids=lambda wish: next(iter(wish))
)
@pytest.mark.parametrize("kind", ["gpt", "gpt2"])
def test_parts_of_the_sequence_and_of_the_words(ranks: Any, kind: str, wishes: dict[str, bool]) -> None:
    """Between stages goes a part of the sequence."""
    assert_as_one_process(ranks(4, trained, kind, {"tensor": 2, "pipeline": 2}, 3, **wishes), kind)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_head_tied_to_its_embedding(ranks: Any, stage: int) -> None:
    """Both ends of the pipeline have it, each tensor rank some of its words."""
    assert_as_one_process(ranks(8, trained, "gpt2", CUBE, stage), "gpt2")


def test_without_a_word_layers_are_shared_as_well(ranks: Any) -> None:
    assert_as_one_process(ranks(4, trained, "gpt2", {"tensor": 2, "pipeline": 2}, 1, first="nobody"), "gpt2")


def planned(folder: str, stage: int) -> tuple[list[float], list[float]]:
    plan = {name: style() for name, style in LLAMA_PLAN.items()}
    return trained("llama", CUBE, stage, plan=plan, load=folder, schedule="zbv", keep="host")


def test_a_given_plan_for_a_model_without_memory(ranks: Any, tmp_path: Path) -> None:
    """All at once: the user's own plan, meta device, three axes, P_a+cpu. No rank ever has memory for the whole."""
    made("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    assert_as_one_process(ranks(8, planned, str(tmp_path), 3), "llama")


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble", "zbv"])
def test_every_schedule(ranks: Any, schedule: str) -> None:
    assert_as_one_process(ranks(4, trained, "gpt2", {"tensor": 2, "pipeline": 2}, 3, schedule=schedule), "gpt2")


@pytest.mark.parametrize("keep", ["device", "host"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_checkpointed_blocks_of_which_each_tensor_rank_keeps_a_part(ranks: Any, schedule: str, keep: str) -> None:
    """Several micro-batches wait for their backward at a time."""
    how = {"schedule": schedule, "keep": keep}
    assert_as_one_process(ranks(4, trained, "gpt", {"tensor": 2, "pipeline": 2}, 3, **how), "gpt")


def without_stages() -> None:
    mesh = zf.mesh(pipeline=2, tensor=2, device="cpu")
    zf.shard(zf.tensor_parallel(made("gpt"), mesh), stage=3, mesh=mesh)


def test_another_order_is_refused(ranks: Any) -> None:
    both = {"tensor": 2, "pipeline": 2}
    for message in ranks(4, raised, Spread, "gpt", both, 3, first="pipeline", sequence_parallel=True):
        assert message.startswith("ValueError: this model is spread over a tensor axis already")
        assert "call zf.tensor_parallel before them" in message
    for message in ranks(4, raised, without_stages):
        assert message.startswith("ValueError: mesh: pipeline=2, and this GPT has not been cut into stages")


BEFORE = 5  # steps that are saved


def save(kind: str, sizes: Sizes, stage: int, folder: str) -> None:
    spread = Spread(kind, sizes, stage)
    spread.losses(0, BEFORE)
    zf.save(spread.model, spread.optimizer, folder).wait()
    zf.close(spread.model)


def gone_on(kind: str, sizes: Sizes, stage: int, folder: str) -> tuple[list[float], list[float]]:
    spread = Spread(kind, sizes, stage)
    zf.load(spread.model, spread.optimizer, folder)
    found = spread.losses(BEFORE, STEPS)
    zf.close(spread.model)
    return found


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A folder with a checkpoint of 2 x 2 x 2 ranks."""

    @cache
    def of(kind: str) -> str:
        folder = str(tmp_path_factory.mktemp(kind))
        ranks(8, save, kind, CUBE, 3, folder)
        return folder

    return of


@pytest.mark.parametrize(
    ("world", "sizes"),
    [(1, {}), (8, {"data": 8}), (8, {"tensor": 2, "pipeline": 4})],
    ids=["one", "data8", "tensor2-pipeline4"],
)
@pytest.mark.parametrize("kind", ["gpt", "gpt2"])
def test_a_checkpoint_of_the_cube_goes_on_in_any_mesh(
    ranks: Any, saved: Callable[[str], str], kind: str, world: int, sizes: Sizes
) -> None:
    stage = 1 if "tensor" in sizes else 3
    assert_as_one_process(ranks(world, gone_on, kind, sizes, stage, saved(kind)), kind, BEFORE)
