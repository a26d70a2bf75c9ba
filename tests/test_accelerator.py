"""Accelerate's loop: the weights of DDP on the same batches, loaders shared out alike, runs that resume."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from contextlib import nullcontext
from multiprocessing import current_process
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import SEQUENCE, VOCABULARY, largest_difference, make_model
from tests.ranks import raised
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import zerofold as zf
from zerofold.compat.accelerator import Accelerator
from zerofold.compat.accelerator_data import Deal


class Tokens(Dataset[Any]):
    """The sample of an index is a function of it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        ids = torch.randint(VOCABULARY, (SEQUENCE + 1,), generator=torch.Generator().manual_seed(index))
        return ids[:-1], ids[1:], index


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.length, step))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # Adam divides a gradient by its size, rounding noise too: at the usual epsilon a sum in another order moved single
    # parameters by 2e-6 on one kind of CPU and by less than 1e-6 on another.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def whole(model: nn.Module) -> list[torch.Tensor]:
    with zf.full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def ddp_loop(accumulate: int, clip: float | None) -> tuple[list[torch.Tensor], list[float]]:
    """Twelve samples, two at a time on each of two ranks: batches 0, 2, 4 here and 1, 3, 5 there."""
    model = make_model(key_bias=False)
    ddp, optimizer = DistributedDataParallel(model), adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = list(DataLoader(Tokens(12), batch_size=2))[dist.get_rank() :: 2]
    rates = []
    for number, (x, y, _) in enumerate(data):
        is_last = (number + 1) % accumulate == 0 or number == len(data) - 1
        with nullcontext() if is_last else ddp.no_sync():
            (ddp(x, y) / accumulate).backward()
        if is_last:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip)
            optimizer.step()
            for _ in range(dist.get_world_size()):
                scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return [p.detach().clone() for p in model.parameters()], rates


def accelerated_loop(stage: int, accumulate: int, clip: float | None, backwards: bool) -> tuple[float, bool]:
    expected, expected_rates = ddp_loop(accumulate, clip)
    accelerator = Accelerator(stage=stage, gradient_accumulation_steps=accumulate)
    model = make_model(key_bias=False)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(Tokens(12), batch_size=2)
    if backwards:  # any order
        scheduler, loader, optimizer, model = accelerator.prepare(scheduler, loader, optimizer, model)
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = []
    for x, y, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x, y))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    found = whole(model)
    accelerator.free_memory()
    return largest_difference(expected, found), rates == expected_rates


@pytest.mark.parametrize(
    ("stage", "accumulate", "clip"), [(0, 2, 0.5), (1, 2, None), (2, 1, None), (3, 1, 0.5), (3, 2, None)]
)
def test_the_loop_equals_ddp(ranks: Any, stage: int, accumulate: int, clip: float | None) -> None:
    bound = 0.0 if clip is None and accumulate == 1 else 1e-6  # sums in another order
    for difference, same_rates in ranks(2, accelerated_loop, stage, accumulate, clip, accumulate == 2):
        assert difference <= bound
        assert same_rates


def source_loop(how: str) -> list[float]:
    """The loop of the source documents, as written there but for the import."""
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.04, "warmup_num_steps": 4}},
    }
    if how == "plugin":
        accelerator = Accelerator(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
    else:
        accelerator = Accelerator(mixed_precision=how)
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(32, 4)
    dataloader = DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)

    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)

    losses = []
    for _ in range(5):
        total = torch.zeros(())
        for x, y_true in dataloader:
            y_pred = model(x)
            l = loss(y_pred, y_true)  # noqa: E741
            accelerator.backward(l)
            optimizer.step()
            optimizer.zero_grad()
            total += l.detach()
        losses.append(accelerator.reduce(total, "mean").item())
    if how == "plugin":
        assert model[0].weight.dtype is torch.bfloat16
        assert not isinstance(model[0].weight, zf.ShardedParameter)  # stage 2: whole
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.04)  # by the config's schedule
    assert not accelerator.optimizer_step_was_skipped
    accelerator.free_memory()
    return losses


@pytest.mark.parametrize("how", ["no", "fp16", "plugin"])
def test_the_loop_of_the_source_documents_trains(ranks: Any, how: str) -> None:
    first, second = ranks(2, source_loop, how)
    assert first == second
    assert first[-1] < first[0] / 3


def shares(length: int, batch_size: int, split: bool, drop_last: bool, even: bool) -> bool:
    """Against Accelerate's own sharing, for this rank."""
    from accelerate.data_loader import BatchSamplerShard

    def sampler() -> BatchSampler:
        return BatchSampler(SequentialSampler(range(length)), batch_size, drop_last)

    rank, world = dist.get_rank(), dist.get_world_size()
    theirs = BatchSamplerShard(sampler(), world, rank, split_batches=split, even_batches=even)
    deal = Deal(batch_size, drop_last, split=split, even=even)
    ours = list(deal(sampler()))
    return ours == list(theirs) and (not even or deal.length(len(sampler())) == len(ours))


def all_shares() -> list[tuple[Any, ...]]:
    cases = [
        (length, size, split, drop_last, even)
        for length in (1, 7, 8, 9, 16, 21)
        for size in (2, 4)
        for split in (False, True)
        for drop_last in (False, True)
        for even in (True, False)
    ]
    return [case for case in cases if not shares(*case)]


def test_loaders_are_shared_out_as_accelerate_does(ranks: Any) -> None:
    pytest.importorskip("accelerate")
    assert ranks(2, all_shares) == [[], []]


def seen(length: int, streamed: bool, split: bool, shuffle: bool) -> dict[str, Any]:
    """What metrics are computed on: every sample once."""
    accelerator = Accelerator(split_batches=split)
    data: Any = Stream(length) if streamed else list(range(length))
    loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=shuffle))
    epochs = []
    for _ in range(2):
        epochs.append([accelerator.gather_for_metrics(batch) for batch in loader])
    objects = [accelerator.gather_for_metrics([f"sample {int(i)}" for i in batch]) for batch in loader]
    return {
        "first": torch.cat(epochs[0]).tolist(),
        "second": torch.cat(epochs[1]).tolist(),
        "objects": sum(len(each) for each in objects),
        "length": None if streamed else len(loader) == len(epochs[0]),
    }


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("streamed", "shuffle"), [(False, False), (False, True), (True, False)])
def test_metrics_see_every_sample_once(ranks: Any, streamed: bool, shuffle: bool, split: bool) -> None:
    first, second = ranks(2, seen, 21, streamed, split, shuffle)
    assert first == second
    assert sorted(first["first"]) == sorted(first["second"]) == list(range(21))
    assert (first["first"] != first["second"]) == shuffle
    assert (first["first"] != list(range(21))) == shuffle
    assert first["objects"] == 21
    assert first["length"] is not False


def seen_through_workers() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Each worker fills up its own last batch: 11 samples of one, 10 of the other, for two ranks."""
    # The tests' ranks are daemons, which may have no children; ranks that users start are not.
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        return _seen_through_workers()
    finally:
        current_process()._config["daemon"] = True  # type: ignore[attr-defined]


def _seen_through_workers() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Stream(21), batch_size=4, num_workers=2, multiprocessing_context="fork"))
    found = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    rest = accelerator.skip_first_batches(loader, 3)
    last = [accelerator.gather_for_metrics(batch).tolist() for batch in rest]
    singles = accelerator.prepare(DataLoader(Stream(3), batch_size=None, num_workers=1, multiprocessing_context="fork"))
    return found, [accelerator.gather_for_metrics(torch.tensor([x])).tolist() for x in singles], last


def test_metrics_see_every_sample_once_through_workers(ranks: Any) -> None:
    first, second = ranks(2, seen_through_workers)
    batches, singles, last = first
    assert first == second
    assert [len(batch) for batch in batches] == [8, 8, 3, 2]
    assert sorted(index for batch in batches for index in batch) == list(range(21))
    assert singles == [[0, 1], [2]]
    assert last == batches[3:]


def train_part(folder: str, steps: int, *, resume: bool, stage: int, save_at: int | None) -> list[Any]:
    """Losses and samples of two epochs of five batches, from a checkpoint on or from the beginning."""
    torch.manual_seed(5)
    accelerator = Accelerator(stage=stage, gradient_accumulation_steps=1, project_dir=folder)
    model = make_model()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
    loader = DataLoader(Tokens(20), batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if resume:
        accelerator.load_state()
    seen: list[Any] = []
    while counter.steps < steps:
        for x, y, index in loader:
            loss = model(x, y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.steps += 1
            draw = torch.rand(()).item()  # the generators go on as well
            seen.append((loss.item(), index.tolist(), scheduler.get_last_lr()[0], draw))
            if counter.steps == save_at:
                accelerator.save_state()
            if counter.steps == steps:
                break
    accelerator.free_memory()
    return seen


class Counter:
    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize(("save_at", "stages"), [(3, (3, 1)), (5, (2, 2)), (7, (3, 3))])
def test_a_resumed_run_equals_an_uninterrupted_one(ranks: Any, tmp_path: Path, save_at: int, stages: Any) -> None:
    whole_run = ranks(2, train_part, str(tmp_path), 9, resume=False, stage=stages[0], save_at=save_at)
    rest = ranks(2, train_part, str(tmp_path), 9, resume=True, stage=stages[1], save_at=None)
    assert [run[save_at:] for run in whole_run] == rest
    assert len(rest[0]) == 9 - save_at


def small_calls(folder: str) -> dict[str, Any]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    order: list[int] = []
    path = Path(folder) / "order"
    with accelerator.main_process_first():
        order.append(path.exists())
        path.touch()
    model = accelerator.prepare(make_model())
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, f"{folder}/model", max_shard_size="1MB")
    found = {
        "first": order[0] is not (rank == 0),
        "padded": accelerator.pad_across_processes(torch.ones(1, 2 + rank), dim=1, pad_index=7).tolist(),
        "gathered": accelerator.gather({"a": torch.tensor(rank), "b": (torch.tensor([True, rank > 0]),)}),
        "mean": accelerator.reduce(torch.tensor([rank * 2.0]), "mean").item(),
        "sum": accelerator.reduce([torch.tensor(1)], "sum", scale=2.0)[0].item(),
        "on main": accelerator.on_main_process(lambda: "here")(),
        "states": len(state),
        "file": os.path.exists(f"{folder}/model/model.safetensors"),
        "same model": accelerator.unwrap_model(model) is model,
    }
    accelerator.free_memory()
    return found


def test_small_calls(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, small_calls, str(tmp_path))
    assert (first.pop("padded"), second.pop("padded")) == ([[1, 1, 7]], [[1, 1, 1]])
    assert (first.pop("on main"), second.pop("on main")) == ("here", None)
    assert (first.pop("states"), second.pop("states")) == (len(make_model().state_dict()), 0)
    for found in (first, second):
        both = found.pop("gathered")
        assert both["a"].tolist() == [0, 1]
        assert both["b"][0].tolist() == [True, False, True, True]
    assert first == second == {"first": True, "mean": 1.0, "sum": 4, "file": True, "same model": True}


def two_models(together: bool) -> tuple[list[torch.Tensor], float]:
    """DreamBooth's loop: clipped as one, with an optimizer each or as one model of two."""
    accelerator = Accelerator(stage=3, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    models = [nn.Linear(3, 4), nn.Linear(4, 1)]
    criterion = nn.MSELoss()
    around = nn.ModuleDict({"unet": models[0], "text": models[1]})
    trained: list[nn.Module] = [around] if together else list(models)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in trained]
    prepared = accelerator.prepare(*trained, criterion, *optimizers)
    optimizers, norm = list(prepared[len(trained) + 1 :]), 0.0
    data = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    for x in data:
        with accelerator.accumulate(*models, criterion):
            accelerator.backward(criterion(models[1](models[0](x)), torch.ones(2, 1)))
            if accelerator.sync_gradients:
                parameters = [p for model in models for p in model.parameters()]
                norm = float(accelerator.clip_grad_norm_(parameters, 0.1))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = [zf.full(p) for model in models for p in model.parameters()]
    accelerator.free_memory()
    return found, norm


def two_models_as_ddp() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    norm = 0.0
    for number, x in enumerate(data):
        with nullcontext() if number % 2 else ddp.no_sync():
            (nn.functional.mse_loss(ddp(x), torch.ones(2, 1)) / 2).backward()
        if number % 2:
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
    expected = [p.detach() for p in model.parameters()]
    runs = [two_models(together) for together in (False, True)]
    return [max(largest_difference(expected, weights), abs(found - norm)) for weights, found in runs]


def test_two_models_are_clipped_and_trained_as_one(ranks: Any) -> None:
    for found in ranks(2, two_models_as_ddp):
        assert max(found) <= 1e-6


def saved_within_a_step(folder: str) -> list[str]:
    accelerator = Accelerator(stage=2, gradient_accumulation_steps=3)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, adamw(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 3)).sum())
                optimizer.step()
                optimizer.zero_grad()
            if number in (1, 2, 3):
                accelerator.save_state(folder)
    accelerator.free_memory()
    return [str(each.message) for each in caught if "save_state" in str(each.message)]


def test_a_save_within_a_step_tells_what_it_leaves_out(ranks: Any, tmp_path: Path) -> None:
    (told,), others = ranks(2, saved_within_a_step, str(tmp_path))
    assert "2 of its 3 micro-batches are done" in told
    assert others == []


def misuse(case: str) -> None:
    model = nn.Linear(4, 4)
    if case == "precision":
        Accelerator(mixed_precision="fp8")
    elif case == "option":
        Accelerator(prepare_options={"stages": 3})
    elif case == "steps":
        Accelerator(gradient_accumulation_steps=0)
    elif case == "optimizer":
        Accelerator().prepare(adamw(model))
    elif case == "two models":
        second = nn.Bilinear(4, 4, 1)
        Accelerator().prepare(model, second, torch.optim.SGD([*model.parameters(), *second.parameters()]))
    elif case == "not prepared":
        Accelerator().accumulate(model).__enter__()
    elif case == "sampler":
        sampler = torch.utils.data.DistributedSampler(list(range(8)))
        Accelerator().prepare(DataLoader(list(range(8)), sampler=sampler))
    elif case == "clip":
        Accelerator().clip_grad_norm_(model.parameters(), 1.0)
    elif case == "save":
        Accelerator().save_state(tempfile.gettempdir())
    elif case == "folder":
        Accelerator().load_state()
    elif case == "register":
        Accelerator().register_for_checkpointing(model.weight)
    elif case == "shapes":
        Accelerator().gather(torch.ones(1 + dist.get_rank()))
    elif case == "config":
        Accelerator(stage=2, config={"zero_optimization": {"stage": 3}})
    elif case == "accumulation":
        config = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1}
        Accelerator(gradient_accumulation_steps=3, config=config).prepare(model)
    elif case == "split":
        Accelerator(split_batches=True).prepare(DataLoader(list(range(8)), batch_size=3))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("precision", "mixed_precision='fp8' does not exist; choose 'no', 'bf16' or 'fp16'"),
        ("option", "prepare_options: zf.prepare has no 'stages'"),
        ("steps", "gradient_accumulation_steps=0 must be at least 1"),
        ("optimizer", "this AdamW holds no parameter of a prepared model"),
        ("two models", "holds parameters of 2 models, the Linear and the Bilinear: make one optimizer for each"),
        ("not prepared", "this Linear is not sharded"),
        ("sampler", "the loader has a DistributedSampler, and would be shared out twice"),
        ("clip", "2 of these parameters are not of a prepared model; pass model.parameters()"),
        ("save", "there is no prepared model to save or load"),
        ("folder", "no folder: pass one, or make the Accelerator with project_dir="),
        ("register", "Parameter needs state_dict and load_state_dict"),
        ("shapes", "the ranks have tensors of shapes [(1,), (2,)]"),
        ("config", "stage=2 and a config are both given: change the config, or leave stage out"),
        ("accumulation", "gradient_accumulation_steps=3, but the config comes to 2"),
        ("split", "batches of 3 samples do not divide evenly over 2 ranks"),
    ],
)
def test_misuse_is_told(ranks: Any, case: str, words: str) -> None:
    for error in ranks(2, raised, misuse, case):
        assert words in error
        assert "\n" not in error


def stopping_and_sharing() -> dict[str, Any]:
    accelerator = zf.Accelerator(cpu=True)
    asked = [accelerator.check_trigger()]
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    asked += [accelerator.check_trigger(), accelerator.check_trigger()]
    shares = []
    for inputs in (["a", "b", "c"], torch.arange(4), {"x": (1, 2), "y": [3, 4]}, ["only"]):
        for padded in (False, True):
            with accelerator.split_between_processes(inputs, apply_padding=padded) as share:
                shares.append(share.tolist() if isinstance(share, torch.Tensor) else share)
    return {"asked": asked, "shares": shares, "type": accelerator.distributed_type}


def test_one_rank_stops_all_and_inputs_are_shared(ranks: Any) -> None:
    first, second, third = ranks(3, stopping_and_sharing)
    assert [found["asked"] for found in (first, second, third)] == [[False, True, False]] * 3
    assert first["type"] == "MULTI_CPU"
    assert [found["shares"][0] for found in (first, second, third)] == [["a"], ["b"], ["c"]]
    assert [found["shares"][2] for found in (first, second, third)] == [[0, 1], [2], [3]]
    assert [found["shares"][3] for found in (first, second, third)] == [[0, 1], [2, 2], [3, 3]]
    assert [found["shares"][4] for found in (first, second)] == [{"x": (1,), "y": [3]}, {"x": (2,), "y": [4]}]
    assert third["shares"][6] == ["only"]


def of_accelerate(case: str) -> None:
    if case == "option":
        zf.Accelerator(cpu=True, log_with="tensorboard")
    accelerator = zf.Accelerator(cpu=True, log_with=None)
    if case == "method":
        accelerator.profile()
    elif case == "loader":
        accelerator.skip_first_batches([1, 2], 1)  # type: ignore[arg-type]
    elif case == "sharing":
        accelerator.split_between_processes(3).__enter__()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("option", "zf.Accelerator has no log_with=: make trackers of your own"),
        ("method", "zf.Accelerator has no 'profile'; what Accelerate has beyond"),
        ("loader", "a list was given; give the loader that prepare returned"),
        ("sharing", "a int was given; give a list"),
    ],
)
def test_what_is_accelerates_alone_is_told(ranks: Any, case: str, words: str) -> None:
    (said,) = ranks(1, raised, of_accelerate, case)
    assert words in said


def test_an_error_inside_a_property_is_not_taken_for_a_missing_name() -> None:
    class Odd(zf.Accelerator):
        @property
        def own(self) -> int:
            raise AttributeError("of its own code")

    accelerator = Odd.__new__(Odd)
    with pytest.raises(AttributeError, match="of its own code"):
        _ = accelerator.own
    with pytest.raises(AttributeError, match="zf.Accelerator has no 'own_too'"):
        _ = accelerator.own_too


def its_own_logger() -> list[str]:
    from accelerate.logging import get_logger
    from accelerate.state import PartialState

    PartialState._reset_state()
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:  # as a launcher does
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}.items():
            patch.setenv(name, value)
        accelerator = Accelerator(cpu=True)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = get_logger("of a script")
    logger.logger.addHandler(handler)
    logger.logger.setLevel("INFO")
    logger.info("once")
    logger.info(accelerator.state, main_process_only=False)
    logger.logger.removeHandler(handler)
    PartialState._reset_state()
    return lines


def test_accelerates_logger_and_what_is_logged_first(ranks: Any) -> None:
    """Every one of Transformers' examples without the Trainer does this."""
    pytest.importorskip("accelerate")
    first, second = ranks(2, its_own_logger)
    assert first[0] == "[RANK 0] once"
    assert len(first) == 2
    (line,) = second
    assert "process_index=1" in line
    assert "deepspeed_plugin=None" in line
