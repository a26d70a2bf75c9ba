"""The built-in job end to end on tiny sizes: it learns, ranks agree, and what it writes can be read back."""

import gc
import json
import math
import weakref
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import RankPool, raised
from zerofold.train import loop
from zerofold.train.gpt import GPTConfig
from zerofold.train.loop import Result, cosine, train
from zerofold.train.options import TrainOptions
from zerofold.train.progress import Reporter, Status, printable, readable_bytes

TINY = GPTConfig(layers=2, hidden=32, heads=2, seq=32)


def run_tiny(out: Path, **options: Any) -> Result:
    options = {"plain": True, "sample_bytes": 8, "validate_every": 10} | options
    rank, world = dist.get_rank(), dist.get_world_size()
    return train(TrainOptions(out=out, gpt=TINY, **options), rank, world, torch.device("cpu"))


@pytest.mark.parametrize("stage", [0, 3])
def test_it_learns_and_leaves_a_readable_run(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    results = ranks(2, run_tiny, tmp_path / "run", stage=stage, steps=25, batch=4, lr=1e-2)
    first = results[0]
    assert first.steps == 25
    assert first.tokens == 25 * 2 * 4 * 32
    assert first.first_loss == pytest.approx(math.log(256), abs=0.2)
    assert first.loss < 4.0
    assert first.sample.startswith(b"def ")
    for other in results[1:]:
        assert (other.loss, other.validation_loss, other.sample) == (
            first.loss,
            first.validation_loss,
            first.sample,
        )

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 25]
    assert lines[-1]["loss"] == first.loss
    assert lines[-1]["validation_loss"] == first.validation_loss
    assert set(lines[-1]["state_bytes"]) == {"parameters", "gradients", "optimizer"}
    assert sum(lines[-1]["comm_bytes"].values()) > sum(lines[0]["comm_bytes"].values()) > 0

    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["stage"], config["world"], config["gpt"]["hidden"]) == (stage, 2, 32)


def test_what_goes_in_cycles_while_it_is_built_is_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the garbage collector is told to leave alone it never frees, a copy of the model on a device, say."""

    class Circle:
        def __init__(self) -> None:
            self.me = self

    class Built:
        def __init__(self, *_: Any) -> None:
            self.left = weakref.ref(Circle())

        def run(self, *_: Any) -> bool:
            gc.collect()
            return self.left() is None

    monkeypatch.setattr(loop, "Training", Built)
    try:
        is_gone: Any = train(TrainOptions(out=tmp_path / "run", gpt=TINY), 1, 2, torch.device("cpu"))
    finally:
        gc.unfreeze()
    assert is_gone


def test_the_same_seed_gives_the_same_run(ranks: RankPool, tmp_path: Path) -> None:
    first = ranks(2, run_tiny, tmp_path / "a", steps=5, batch=2)[0]
    second = ranks(2, run_tiny, tmp_path / "b", steps=5, batch=2)[0]
    assert (first.loss, first.validation_loss, first.sample) == (
        second.loss,
        second.validation_loss,
        second.sample,
    )


def test_checkpointed_blocks_change_no_loss(ranks: RankPool, tmp_path: Path) -> None:
    first = ranks(2, run_tiny, tmp_path / "a", steps=5, batch=2)[0]
    disk = {"keep": "nvme", "offload_path": str(tmp_path / "disk")}
    for name, options in {"every": {"checkpoint_every": 2}, "host": {"checkpoint_every": 1, "keep": "host"}}.items():
        assert ranks(2, run_tiny, tmp_path / name, steps=5, batch=2, **options)[0].loss == first.loss
    assert ranks(2, run_tiny, tmp_path / "nvme", steps=5, batch=2, checkpoint_every=1, **disk)[0].loss == first.loss


def test_time_ends_a_run_on_all_ranks_at_the_same_step(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks(2, run_tiny, tmp_path / "run", minutes=0.5 / 60, batch=1)
    assert results[0].steps == results[1].steps > 1
    assert 0.5 <= results[0].seconds < 10


def test_a_loss_that_is_not_finite_stops_the_run_with_the_fix(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks(2, raised, run_tiny, tmp_path / "run", steps=60, batch=2, lr=1e30):
        assert message.startswith("RuntimeError: the loss is ")
        assert "smaller learning rate" in message


def test_one_rank_runs_the_same_code(ranks: RankPool, tmp_path: Path) -> None:
    (result,) = ranks(1, run_tiny, tmp_path / "run", steps=3, batch=2)
    assert result.steps == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 7}, "stage"),
        ({"batch": 0}, "batch is 0: give at least 1"),
        ({"steps": 0}, "steps is 0"),
        ({"minutes": -1.0}, "minutes is -1.0: give a number above 0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"seed": -1}, "seed is -1: give 0 or more"),
        ({"offload": "hots"}, "did you mean 'host'?"),
        ({"offload": "1.5"}, "from 0 to 1"),
        ({"offload": "nvme"}, "add --offload-path DIR"),
        ({"offload_path": "/disk"}, "add --offload nvme or auto"),
        ({"checkpoint_every": -1}, "checkpoint_every is -1: give 0 or more"),
        ({"checkpoint_every": 1, "keep": "moon"}, "--keep moon is not known: use device, host, nvme"),
        ({"keep": "host"}, "add --checkpoint-every 1"),
        ({"checkpoint_every": 1, "keep": "nvme"}, "add --offload-path DIR"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(out=Path("nowhere"), **options)


def test_offload_is_what_prepare_takes() -> None:
    assert TrainOptions(out=Path("nowhere")).offload_wish is None
    assert TrainOptions(out=Path("nowhere"), offload="0.25").offload_wish == {"optimizer": 0.25}
    on_disk = TrainOptions(out=Path("nowhere"), offload="auto", offload_path="/disk")
    assert on_disk.offload_wish == {"optimizer": "auto", "path": "/disk"}


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="already holds a run"):
        TrainOptions(out=tmp_path)


def test_progress_is_what_comes_first_of_steps_and_time() -> None:
    options = TrainOptions(out=Path("nowhere"), steps=100, minutes=1.0)
    assert options.progress(50, 3.0) == 0.5
    assert options.progress(50, 45.0) == 0.75
    assert options.progress(1, 90.0) == 1.0
    assert TrainOptions(out=Path("nowhere")).step_limit == 300
    assert TrainOptions(out=Path("nowhere"), minutes=1.0).step_limit is None


def test_the_learning_rate_falls_to_a_tenth() -> None:
    assert (cosine(0.0), cosine(1.0)) == (1.0, pytest.approx(0.1))


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("output", "plain"), [(StringIO(), False), (Terminal(), False), (Terminal(), True)])
def test_a_status_is_shown_as_a_bar_or_as_lines(output: StringIO, plain: bool) -> None:
    status = Status(
        step=10,
        progress=0.1,
        seconds=1.0,
        loss=4.5,
        validation_loss=4.75,
        lr=1e-3,
        tokens=20480,
        tokens_per_second=20480.0,
        state_bytes={"parameters": 3 * 2**20, "gradients": 0, "optimizer": 6 * 2**20},
        comm_bytes={"broadcast": 2**20, "all_to_all": 2**20},
    )
    with Reporter(plain=plain, steps=100, output=output) as reporter:
        reporter.show(status)
    shown = output.getvalue()
    assert "step 10/100, loss 4.500, val 4.750, 20,480 tokens/s" in shown
    assert "parameters 3.0, gradients 0.0, optimizer 6.0; sent 2.0 MiB" in shown
    assert ("\x1b[" in shown) == (output.isatty() and not plain)
    assert ("0:00:09 left" in shown) == ("\x1b[" not in shown)


def test_model_output_cannot_drive_the_terminal() -> None:
    assert printable(b"a\x1b[2J\tb\n\xff\r") == "a·[2J   b\n\ufffd·"
    assert readable_bytes(512) == "512 B"
    assert readable_bytes(3 * 2**30) == "3.0 GiB"
