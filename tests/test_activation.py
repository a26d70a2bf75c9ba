"""Checkpointed blocks give the bits of blocks that keep everything, on every row, wherever their inputs wait."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy

import zerofold as zf
from models import Block, TinyGPT, batches, make_model
from ranks import raised
from zerofold.compat.activations import keeping
from zerofold.compat.deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from zerofold.memory.disk import DiskError

ROWS: list[int | str] = [0, 1, 2, 3, "dp", "hsdp", "hpz"]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reentrant": {"use_reentrant": True},
    "two": {"every": 2},
    "three_on_host": {"every": 3, "keep": "host"},
    "host": {"keep": "host"},
    "host_reentrant": {"keep": "host", "use_reentrant": True},
    "contiguous": {"contiguous": True, "every": 2},
}


def trained(row: int | str, how: dict[str, Any] | None, *, after: bool = False, **settings: Any) -> list[Tensor]:
    """Weights after two steps of two micro-batches, the first under no_sync."""
    model = make_model(layers=5)
    if how is not None and not after:
        zf.checkpoint_blocks(model, **how)
    if row in ("hsdp", "hpz"):
        settings["mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("across", "inside"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zf.prepare(model, optimizer, stage=row, units=Block, **settings)
    if how is not None and after:
        zf.checkpoint_blocks(model, **how)
    data = list(batches(4))
    for first, second in zip(data[::2], data[1::2], strict=True):
        with zf.no_sync(model):
            model(*first).backward()
        model(*second).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zf.full_params(model):
        weights = [p.detach().clone() for p in model.parameters()]
    zf.close(model)
    return weights


def ways_apart(row: int | str, folder: str) -> dict[str, bool]:
    plain = trained(row, None)
    ways = {**WAYS, "nvme": {"keep": "nvme", "path": folder}}
    if row != 3:  # more of the same
        ways = {name: ways[name] for name in ("plain", "host_reentrant", "three_on_host", "contiguous")}
    found = {
        name: all(map(torch.equal, plain, trained(row, how, after=index % 2 == 1)))
        for index, (name, how) in enumerate(ways.items())
    }
    away = {"optimizer": "host", "parameters": "host"} if row in (3, "hsdp") else "host"
    if row in (2, 3):
        plain = trained(row, None, offload=away)
        found["offloaded"] = all(map(torch.equal, plain, trained(row, {"keep": "host"}, offload=away)))
    return found


@pytest.mark.parametrize("row", ROWS)
def test_every_row_and_way_gives_the_same_bits(ranks: Any, row: int | str, tmp_path: Path) -> None:
    for found in ranks(2, ways_apart, row, str(tmp_path)):
        assert all(found.values()), found


def accumulated(how: dict[str, Any] | None) -> list[Tensor]:
    model = make_model(layers=4)
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, units=Block)
    checkpointing = None if how is None else zf.checkpoint_blocks(model, **how)
    zf.accumulate(model, lambda model, batch: model(*batch), list(batches(3)))
    if checkpointing is not None and checkpointing.store is not None:
        assert checkpointing.store.peak_device_nbytes == 0  # nothing was kept twice
    optimizer.step()
    with zf.full_params(model):
        weights = [p.detach().clone() for p in model.parameters()]
    zf.close(model)
    return weights


def accumulated_alike() -> list[bool]:
    plain = accumulated(None)
    return [all(map(torch.equal, plain, accumulated(how))) for how in ({}, {"every": 2, "keep": "host"})]


def test_accumulate_computes_units_again_by_itself(ranks: Any) -> None:
    assert ranks(1, accumulated_alike) == [[True, True]]


class Noisy(nn.Module):
    """A block whose result depends on random numbers and on autocast, with a checkpoint of its own inside."""

    def __init__(self, store: zf.CheckpointStore | None = None) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.5)
        self.nested, self.store = False, store

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        inner = zf.checkpoint(self.middle, x, store=self.store) if self.nested else self.middle(x)
        return x + self.drop(self.down(inner)) * (1 if scale is None else scale)

    def middle(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.up(x)))


def noisy(how: dict[str, Any] | None, *, nested: bool = False) -> list[Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(*(Noisy() for _ in range(3)))
    checkpointing = None if how is None else zf.checkpoint_blocks(model, units=Noisy, **how)
    for block in model:
        block.nested = nested
        block.store = None if checkpointing is None else checkpointing.store
    x = torch.randn(4, 16, requires_grad=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
    return [x.grad, torch.randn(3), *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("name", [*WAYS])
def test_random_numbers_and_autocast_come_back(name: str) -> None:
    assert all(map(torch.equal, noisy(None), noisy(WAYS[name])))


@pytest.mark.parametrize("how", [{}, {"keep": "host"}, {"keep": "host", "use_reentrant": True}, {"contiguous": True}])
def test_a_checkpoint_inside_a_checkpoint(how: dict[str, Any]) -> None:
    assert all(map(torch.equal, noisy(None), noisy(how, nested=True)))


@pytest.mark.parametrize("keep", ["device", "host"])
def test_reentrant_blocks_behind_frozen_embeddings_are_trained(keep: str) -> None:
    """Their input has no gradient, and torch's reentrant checkpoint would give their parameters none."""

    def run(how: dict[str, Any] | None) -> list[Tensor | None]:
        model = make_model(layers=2)
        for frozen in (model.tokens, model.positions, model.blocks[0].qkv):
            frozen.requires_grad_(False)
        if how is not None:
            zf.checkpoint_blocks(model, **how)
        model(*next(batches(1, rank=0))).backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    for expected, found in zip(run(None), run({"use_reentrant": True, "keep": keep}), strict=True):
        assert expected is not None
        assert found is not None
        assert torch.equal(expected, found)


def test_selective_checkpointing_keeps_what_the_policy_says() -> None:
    multiplied = []

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = operation in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        if is_product:
            multiplied.append(context.is_recompute)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def run(how: dict[str, Any] | None) -> list[Tensor]:
        model = make_model(layers=2)
        if how is not None:
            zf.checkpoint_blocks(model, **how)
        model(*next(batches(1, rank=0))).backward()
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    assert all(map(torch.equal, run(None), run({"policy": policy, "keep": "host"})))
    assert multiplied.count(False) == 8  # four products in each of two blocks
    with pytest.raises(ValueError, match="policy= needs a checkpoint that is not reentrant"):
        run({"policy": policy, "use_reentrant": True})


def hugging_face(name: str, how: dict[str, Any] | None, use_cache: bool = False) -> list[Tensor]:
    import zoo  # here, because Transformers takes long to load

    entry = zoo.ZOO[name]
    model = zoo.build(entry)
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    checkpointing = None if how is None else zf.checkpoint_blocks(model, **how)
    for batch in zoo.batches(entry, 2):
        # Not into a cache, which checkpoints leave out: what passes through one is added up in another order.
        model(**batch, use_cache=use_cache).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        prompt = zoo.batches(entry, 1, start=9)[0]["input_ids"]
        text = model.generate(input_ids=prompt, max_new_tokens=3, do_sample=False)  # with a cache, as always
        model.train()
    if checkpointing is not None and checkpointing.store is not None:
        assert checkpointing.store.peak_device_nbytes > 0 == checkpointing.nbytes["host"]
    with zf.full_params(model):
        weights = [p.detach().clone() for p in model.parameters()]
    zf.close(model)
    return [text, *weights]


def hugging_face_alike(name: str) -> list[bool]:
    plain = hugging_face(name, None)
    ways: list[dict[str, Any]] = [{}, {"keep": "host"}, {"contiguous": True}]
    ways += [{"every": 2}, {"every": 3, "keep": "host"}] if name == "llama" else []
    with_cache = zip(plain, hugging_face(name, {}, use_cache=True), strict=True)
    assert all(torch.allclose(one.float(), other.float(), atol=1e-6) for one, other in with_cache)
    return [all(map(torch.equal, plain, hugging_face(name, how))) for how in ways]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_hugging_face_models_train_and_generate_alike(ranks: Any, name: str) -> None:
    assert all(all(found) for found in ranks(1, hugging_face_alike, name))


class Skipping(TinyGPT):
    """Its blocks get something other than what the block before has made."""

    def forward(self, indices: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(indices)
        for block in self.blocks:
            x = block(x * 1.0)
        return x.sum()


def test_blocks_that_are_no_chain_are_refused() -> None:
    model = Skipping(layers=4)
    zf.checkpoint_blocks(model, every=2)
    with pytest.raises(ValueError, match="do not simply follow each other.*use every=1"):
        model(*next(batches(1, rank=0)))
    blocks = nn.ModuleList(Noisy() for _ in range(2))
    zf.checkpoint_blocks(blocks, every=2)
    x = blocks[0](torch.ones(2, 16, requires_grad=True))
    with pytest.raises(ValueError, match="use every=1"):  # the first was called without
        blocks[1](x, torch.ones(()))


def test_t5_passes_a_bias_on_and_says_that_its_blocks_stand_alone(ranks: Any) -> None:
    assert "use every=1" in ranks(1, raised, hugging_face, "t5", {"every": 2})[0]


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(64, 64), False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("on purpose")
        return self.linear(x)


@pytest.mark.parametrize("how", [{"keep": "host"}, {"contiguous": True}, {"keep": "host", "every": 2}])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_an_exception_inside_a_block_leaves_no_memory_behind(how: dict[str, Any], fails_in: str) -> None:
    model = nn.Sequential(*(Fragile() for _ in range(4)))
    checkpointing = zf.checkpoint_blocks(model, **how)
    x = torch.ones(8, 64, requires_grad=True)
    for _ in range(3):
        model[2].fails = fails_in == "forward"
        with pytest.raises(ArithmeticError):
            loss = model(x).sum()
            model[2].fails = True
            try:
                loss.backward()
            finally:
                del loss
        gc.collect()
        assert sum(checkpointing.nbytes.values()) == 0
    model[2].fails = False
    model(x).sum().backward()
    assert sum(checkpointing.nbytes.values()) == 0


def test_after_an_error_of_the_disk_checkpoints_can_be_removed(tmp_path: Path) -> None:
    """The graph of that forward goes in cycles with its traceback, of which whoever catches it need not know."""
    (tmp_path / "file").touch()
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    checkpointing = zf.checkpoint_blocks(model, keep="nvme", path=tmp_path / "file")
    gc.disable()
    try:
        with contextlib.suppress(DiskError):
            model(torch.ones(8, 64, requires_grad=True))
        checkpointing.remove()
    finally:
        gc.enable()
    assert sum(checkpointing.nbytes.values()) == 0


def test_names_copies_and_classes_stay() -> None:
    plain, model = make_model(layers=2), make_model(layers=2)
    checkpointing = zf.checkpoint_blocks(model, keep="host")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model.blocks[0], Block)
    assert type(model.blocks[0]).__name__ == "Block"
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made.blocks[0]) is Block
        made(*next(batches(1, rank=0))).backward()
        assert checkpointing.nbytes["host"] == 0
    with pytest.raises(ValueError, match="called on this model already"):
        zf.checkpoint_blocks(model)
    checkpointing.remove()
    assert type(model.blocks[0]) is Block
    assert vars(model).keys() == vars(plain).keys()
    zf.checkpoint_blocks(model).remove()


def test_a_backward_that_may_still_come_is_not_left_without_its_inputs() -> None:
    model = make_model(layers=2)
    checkpointing = zf.checkpoint_blocks(model, keep="host")
    loss = model(*next(batches(1, rank=0)))
    with pytest.raises(RuntimeError, match="bytes of this store are kept for a backward"):
        checkpointing.remove()
    loss.backward()
    checkpointing.remove()


def test_two_backwards_over_one_graph() -> None:
    def gradients(how: dict[str, Any] | None) -> list[Tensor]:
        model = make_model(layers=3)
        checkpointing = None if how is None else zf.checkpoint_blocks(model, **how)
        loss = model(*next(batches(1, rank=0)))
        loss.backward(retain_graph=True)
        loss.backward()
        assert checkpointing is None or sum(checkpointing.nbytes.values()) == 0
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    plain = gradients(None)
    for how in ({"keep": "host"}, {"contiguous": True}, {"keep": "host", "every": 2}):
        assert all(map(torch.equal, plain, gradients(how))), how


def keys_of_deepspeed() -> list[Any]:
    """deepspeed.checkpointing.checkpoint inside a model, told by the config of its engine how to keep its inputs."""
    found: list[Any] = []
    sections: list[dict[str, bool]] = [{}, {"cpu_checkpointing": True}, {"contiguous_memory_optimization": True}]
    for section in [*sections, {"cpu_checkpointing": True, "synchronize_checkpoint_boundary": True}]:
        model = Told()
        config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
        engine, _, _, _ = zf.initialize(model=model, config={**config, "activation_checkpointing": {**section}})
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        engine.step()
        weights = [zf.full(p) for p in model.parameters()]
        found.append((model.tiers, [weight.tolist() for weight in weights]))
        engine.destroy()
        deepspeed_checkpointing.configure()
    return found


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.tiers: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.layers[0].bias
        for layer in self.layers:
            x = deepspeed_checkpointing.checkpoint(layer, x)
        store = keeping().store
        if store is not None:
            self.tiers |= {tier for tier, nbytes in store.nbytes.items() if nbytes}
        return x


def test_number_checkpoints_takes_their_memory_with_the_first() -> None:
    deepspeed_checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=5)
    store, x = keeping().store, torch.ones(256, requires_grad=True)
    assert store is not None
    kept = [deepspeed_checkpointing.checkpoint(torch.exp, x * 1)]
    assert store.arena_nbytes == 5 * x.nbytes
    kept += [deepspeed_checkpointing.checkpoint(torch.exp, x * each) for each in range(4)]
    assert store.arena_nbytes == store.nbytes["device"] == 5 * x.nbytes
    torch.stack(kept).sum().backward()
    deepspeed_checkpointing.configure()


@pytest.mark.parametrize("name", ["checkpoint", "non_reentrant_checkpoint"])
def test_profile_says_what_each_checkpoint_took(capsys: pytest.CaptureFixture[str], name: str) -> None:
    deepspeed_checkpointing.configure(profile=True)
    x = torch.ones(4, requires_grad=True)
    result = getattr(deepspeed_checkpointing, name)(torch.exp, x * 2)
    (forward,) = capsys.readouterr().out.splitlines()
    result.sum().backward()
    (backward,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"checkpoint of exp: \d+\.\d\d ms in forward", forward)
    assert re.fullmatch(r"checkpoint of exp: \d+\.\d\d ms in backward, again", backward)
    deepspeed_checkpointing.configure()


def test_the_keys_of_deepspeed_say_where_inputs_wait(ranks: Any) -> None:
    (found,) = ranks(1, keys_of_deepspeed)
    assert [tiers for tiers, _ in found] == [set(), {"device", "host"}, {"device"}, {"device", "host"}]
    assert all(weights == found[0][1] for _, weights in found)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"every": 0}, "every=0: give the number of blocks"),
        ({"policy": "mm"}, "policy='mm': give a list of operators"),
        ({"keep": "moon"}, "keep='moon': use"),
        ({"keep": "nvme"}, "needs a folder on the disk: add path="),
        ({"keep": "host", "contiguous": True}, "contiguous=True is for keep="),
    ],
)
def test_what_cannot_be_is_said_in_one_line(how: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        zf.checkpoint_blocks(make_model(), **how)
