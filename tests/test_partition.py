"""P_a: inputs of blocks cut over tensor ranks. The same bits, a part of the memory, gathered one block ahead."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import zerofold as zf
from ranks import raised
from tensor_blocks import LAYERS, ROWS, WIDTH, TensorBlock, tensor_data, tensor_model
from zerofold.activation.partition import Partition
from zerofold.compat.activations import keeping
from zerofold.compat.deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from zerofold.compat.deepspeed.utils import groups
from zerofold.compat.mesh_in_use import use_mesh


def trained(spread: zf.Mesh, stage: int, rows: int, *, is_cut: bool, how: dict[str, Any]) -> list[Tensor]:
    """What this rank has after two steps of two micro-batches."""
    model = tensor_model(spread)
    model, optimizer = zf.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, mesh=spread, units=TensorBlock
    )
    checkpointing = zf.checkpoint_blocks(model, partition=spread if is_cut else None, **how)
    torch.manual_seed(7)
    for index, x in enumerate(tensor_data(spread, 4, rows), start=1):
        model(x).backward()
        if index % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    with zf.full_params(model):
        weights = [p.detach().clone() for p in model.parameters()]
    assert sum(checkpointing.nbytes.values()) == 0
    assert (checkpointing.sent_nbytes > 0) is is_cut
    checkpointing.remove()
    zf.close(model)
    return weights


def ways_alike(stage: int, rows: int, ways: dict[str, dict[str, Any]]) -> dict[str, bool]:
    spread = zf.mesh(tensor=2, device="cpu")
    plain = trained(spread, stage, rows, is_cut=False, how={})
    found = {name: trained(spread, stage, rows, is_cut=True, how=how) for name, how in ways.items()}
    return {name: all(map(torch.equal, plain, weights)) for name, weights in found.items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_same_bits_on_every_row_wherever_parts_wait(ranks: Any, stage: int, tmp_path: Path) -> None:
    """Two tensor ranks by two data ranks. In turn with an odd number of elements, of which the last rank has fewer."""
    ways = {
        0: {"device": {}, "reentrant": {"use_reentrant": True}},
        1: {"host": {"keep": "host", "use_reentrant": True}},
        2: {"nvme": {"keep": "nvme", "path": str(tmp_path)}},
        3: {"device": {}, "two": {"every": 2}, "host": {"keep": "host"}},
    }[stage]
    rows = ROWS if stage % 2 else ROWS + 1
    assert ranks(4, ways_alike, stage, rows, ways) == [dict.fromkeys(ways, True)] * 4


def odd_bits() -> list[bool]:
    """A length that four ranks cannot share evenly."""
    spread = zf.mesh(tensor=4, device="cpu")
    found = []
    for shape in ((3, 5), (1, 2), (7, 3)):
        x = torch.arange(float(shape[0] * shape[1])).view(shape).t().requires_grad_()  # strides of another order
        store = zf.CheckpointStore("device", partition=spread)
        zf.checkpoint(torch.exp, x * 2, store=store).sum().backward()
        again = x.detach().requires_grad_()
        (again * 2).exp().sum().backward()
        assert x.grad is not None
        assert again.grad is not None
        found.append(torch.equal(x.grad, again.grad))
        store.close()
    return found


def test_uneven_parts_and_other_strides(ranks: Any) -> None:
    assert ranks(4, odd_bits) == [[True] * 3] * 4


def kept(tensor: int, keep: str) -> tuple[dict[str, int], int]:
    spread = zf.mesh(tensor=tensor, device="cpu")
    model = tensor_model(spread, layers=6)
    checkpointing = zf.checkpoint_blocks(model, keep=keep, partition=spread, units=TensorBlock)
    assert checkpointing.store is not None
    found: dict[str, int] = {}
    for _ in range(2):
        (x,) = tensor_data(spread, 1, rows=64)
        loss = model(x)
        found = checkpointing.nbytes
        loss.backward()
        del loss
        assert sum(checkpointing.nbytes.values()) == 0
    peak = checkpointing.store.peak_device_nbytes
    checkpointing.remove()
    return found, peak


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_rank_keeps_its_part_and_no_more(ranks: Any, tensor: int) -> None:
    whole = 64 * WIDTH * 4
    for found, peak in ranks(tensor, kept, tensor, "device"):
        assert found == {"device": 6 * whole // tensor, "host": 0, "nvme": 0}
        assert peak <= 6 * whole // tensor + 2 * whole  # and two inputs that are whole again in backward
    for found, peak in ranks(tensor, kept, tensor, "host"):
        pages = -(-(whole // tensor) // 4096) * 4096
        assert found == {"device": 2 * whole, "host": 6 * pages, "nvme": 0}
        assert peak == 2 * whole


def sent(tensor: int, dropout: float) -> tuple[float, float, int]:
    """By a rank in one step, in elements of a ring: for the blocks themselves, and to rebuild inputs."""
    spread = zf.mesh(tensor=tensor, device="cpu")
    model = tensor_model(spread)
    for block in model.blocks:
        setattr(block, "dropout", dropout)  # noqa: B010
    checkpointing = zf.checkpoint_blocks(model, partition=spread, units=TensorBlock)
    data = tensor_data(spread, 2)
    model(data[0]).backward()  # in the first step inputs are compared as well
    reduced, before = model.ring.reduced, checkpointing.sent_nbytes
    model(data[1]).backward()
    share = (tensor - 1) / tensor
    reduces = (model.ring.reduced - reduced) // (ROWS * WIDTH)
    result = 2 * share * (model.ring.reduced - reduced), (checkpointing.sent_nbytes - before) / 4, reduces
    checkpointing.remove()
    return result


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize(("dropout", "again"), [(0.1, 2), (0.0, 1)])
def test_rebuilding_sends_a_tenth_of_what_the_blocks_send_at_most(
    ranks: Any, tensor: int, dropout: float, again: int
) -> None:
    """Of b·s·h elements: an all-gather a block, beside two all-reduces in forward, two in backward and those of the
    recomputation, which ends before the last of them where nothing behind it is wanted. An all-reduce sends twice as
    much as a gather: a twelfth, or a tenth.
    """
    for blocks, inputs, reduces in ranks(tensor, sent, tensor, dropout):
        assert reduces == (4 + again) * LAYERS
        assert inputs == LAYERS * ROWS * WIDTH * (tensor - 1) / tensor
        assert inputs / blocks == pytest.approx(1 / (2 * (4 + again)))


def order(keep: str) -> list[str]:
    """Of gathers and of blocks that are computed again."""
    spread = zf.mesh(tensor=2, device="cpu")
    model = tensor_model(spread)
    checkpointing = zf.checkpoint_blocks(model, keep=keep, partition=spread, units=TensorBlock)
    log: list[str] = []
    rebuild = Partition.rebuild

    def noted(self: Partition, whole: Any, *args: Any) -> Any:
        log.append(f"gather {whole.name[-1]}")
        return rebuild(self, whole, *args)

    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda module, args, index=index: log.append(f"block {index}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partition, "rebuild", noted)
        loss = model(tensor_data(spread, 1)[0])
        log.clear()
        loss.backward()
    checkpointing.remove()
    return log


def test_a_part_is_gathered_while_the_block_after_it_computes(ranks: Any) -> None:
    """On the host the inputs of the last two blocks have not left the device, and nothing is gathered for them."""
    ahead = "gather 3, gather 2, block 3, gather 1, block 2, gather 0, block 1, block 0"
    for log in ranks(2, order, "device"):
        assert ", ".join(log) == ahead
    for log in ranks(2, order, "host"):
        assert ", ".join(log) == "block 3, gather 1, block 2, gather 0, block 1, block 0"


def unlike(where: str) -> None:
    """Samples, or random numbers, that differ between the tensor ranks."""
    spread = zf.mesh(tensor=2, device="cpu")
    model = tensor_model(spread)
    zf.checkpoint_blocks(model, partition=spread, units=TensorBlock)
    torch.manual_seed(dist.get_rank() if where == "dropout" else 0)
    (x,) = tensor_data(spread, 1)
    model(x + dist.get_rank() if where == "samples" else x)


def test_inputs_that_differ_are_refused_by_name(ranks: Any) -> None:
    for message in ranks(2, raised, unlike, "samples"):
        assert "ValueError: partition=: the inputs of blocks.0 are not the same on the 2 tensor ranks" in message
    for message in ranks(2, raised, unlike, "dropout"):  # which is behind the first block
        assert "the inputs of blocks.1 are not the same" in message


class Bounded(nn.Module):
    """Has a parameter, as every unit does, and needs none for its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def with_dtensors() -> tuple[list[str], int]:
    spread = zf.mesh(tensor=2, device="cpu")
    layers = nn.ModuleList(Bounded() for _ in range(3))
    checkpointing = zf.checkpoint_blocks(layers, partition=spread, units=Bounded)
    x: Any = distribute_tensor(torch.ones(4, 4), spread.along("tensor"), [Shard(0)]).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = x
        for layer in layers:
            made = layer(made)
        made.to_local().sum().backward()
    before = checkpointing.sent_nbytes
    assert x.grad is not None
    checkpointing.remove()
    return [str(each.message) for each in caught if "partition=" in str(each.message)], before


def test_parts_are_kept_as_they_are_and_it_is_said_once(ranks: Any) -> None:
    for said, _ in ranks(2, with_dtensors):
        assert len(said) == 1
        assert "an input of 0, (4, 4), is a DTensor" in said[0]


class Mpu:
    """As Megatron has it."""

    def __init__(self, mesh: zf.Mesh) -> None:
        self._group = mesh.along("tensor").get_group()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._group


def by_deepspeeds_names() -> list[tuple[bool, bool]]:
    """Whether a rank keeps half of an input, and the gradients are right; with Megatron's way to say it and ours."""
    spread = zf.mesh(tensor=2, device="cpu")
    found = []
    for said in (Mpu(spread), spread):
        deepspeed_checkpointing.configure(said, partition_activations=True)
        x = torch.linspace(0, 1, 1024).requires_grad_()
        loss = deepspeed_checkpointing.checkpoint(torch.exp, x * 2).sum()
        store = keeping().store
        is_half = store is not None and store.nbytes["device"] == x.nbytes // 2
        loss.backward()
        found.append((is_half, torch.equal(x.grad, 2 * (x.detach() * 2).exp())))  # type: ignore[arg-type]
    deepspeed_checkpointing.configure()
    return found


class Checkpoints(nn.Module):
    """As scripts for DeepSpeed call it. Its MLP is known, and shared by tensor ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.kept = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for mlp in self.mlps:
            x = x + deepspeed_checkpointing.checkpoint(mlp, x)
        store = keeping().store
        self.kept = 0 if store is None else store.nbytes["host"]
        return x.square().mean()


def by_a_config(tensor: int) -> tuple[list[float], int, tuple[int, ...]]:
    """Losses of four steps of two samples, what was kept at most, and whose batch is what."""
    torch.set_num_threads(1)
    mesh = None if tensor == 1 else zf.mesh(tensor=tensor, device="cpu")
    model = Checkpoints()
    section = {"partition_activations": True, "cpu_checkpointing": True}
    engine, _, loader, _ = zf.initialize(
        model=model,
        training_data=torch.utils.data.TensorDataset(torch.linspace(0, 1, 16 * 512 * 8).view(16, 512, 8)),
        config={
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
            "zero_optimization": {"stage": 3},
            "activation_checkpointing": section,
        },
        mpu=mesh,
    )
    assert loader is not None
    losses, most = [], 0
    for (x,) in loader:
        loss = engine(x)
        most = max(most, model.kept)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    found = engine.get_batch_info(), engine.dp_world_size
    # Whoever deals out samples by DeepSpeed's own functions has to give tensor ranks the same.
    assert groups._get_data_parallel_world_size() == engine.dp_world_size
    assert groups._get_data_parallel_rank() == dist.get_rank() // tensor
    assert groups._get_model_parallel_world_size() == tensor
    assert dist.get_world_size(groups._get_data_parallel_group()) == engine.dp_world_size
    engine.destroy()
    deepspeed_checkpointing.configure()
    use_mesh(None)
    return losses, most, (*found[0], found[1])


def test_a_mesh_given_to_initialize_cuts_layers_and_checkpoints(ranks: Any) -> None:
    """Two tensor ranks of two data ranks train as two ranks alone do, and keep half of every input."""
    (expected, whole, _), _ = ranks(2, by_a_config, 1)
    for losses, kept, batch in ranks(4, by_a_config, 2):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert kept == whole / 2 > 0
        assert batch == (4, 2, 1, 2)


def test_deepspeeds_keys_cut_inputs_too(ranks: Any) -> None:
    assert ranks(2, by_deepspeeds_names) == [[(True, True)] * 2] * 2
    with pytest.raises(ValueError, match="mpu_=object has neither get_tensor_model_parallel_group"):
        deepspeed_checkpointing.configure(object(), partition_activations=True)


def alone() -> tuple[int, str]:
    """One tensor rank: nothing to cut, and no store for it."""
    spread = zf.mesh(device="cpu")
    model = tensor_model(spread)
    checkpointing = zf.checkpoint_blocks(model, partition=spread, units=TensorBlock)
    model(tensor_data(spread, 1)[0]).backward()
    assert checkpointing.store is None
    with pytest.raises(ValueError, match=r"partition='yes': give what zf.mesh") as caught:
        zf.checkpoint_blocks(tensor_model(spread), partition="yes")  # type: ignore[arg-type]
    return checkpointing.sent_nbytes, str(caught.value)


def test_without_tensor_ranks_nothing_is_cut(ranks: Any) -> None:
    assert ranks(2, alone)[0][0] == 0
