"""Checkpoints of what is rare: odd names, odd optimizers, folders of others, states that change at the wrong moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ranks import RankPool
from tests.test_checkpoint_damage import rewrite
from torch import Tensor, nn

import zerofold as zf
from zerofold.checkpoint.native import verify_native
from zerofold.checkpoint.staging import Snapshot


def folder() -> Path:
    """The same on all ranks."""
    found = [tempfile.mkdtemp()]
    dist.broadcast_object_list(found, src=0)
    return Path(found[0])


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def step(model: nn.Module, optimizer: Any) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def weights(model: nn.Module) -> list[Tensor]:
    return [zf.full(p) for p in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def goes_on(make: Callable[[nn.Module], Any], **settings: Any) -> bool:
    """Whether a step after a load gives the bits of one without."""
    path = folder()
    model = layers()
    model, optimizer = zf.prepare(model, make(model), **settings)
    step(model, optimizer)
    zf.save(model, optimizer, path)
    step(model, optimizer)
    expected = weights(model)
    zf.close(model)
    model = layers(1)
    model, optimizer = zf.prepare(model, make(model), **settings)
    zf.load(model, optimizer, path)
    step(model, optimizer)
    found = same(weights(model), expected)
    zf.close(model)
    return found


class Lists(torch.optim.Optimizer):
    """Keeps matrices in a list, and something under no parameter, as second-order methods do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        self.state["all"] = {"steps": self.state.get("all", {}).get("steps", 0) + 1}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("kept", [torch.zeros_like(p), 0])
                    kept[0] = kept[0] * 0.5 + p.grad
                    kept[1] += 1
                    p.data.sub_(kept[0], alpha=0.1 / kept[1])
        return loss


def optimizers() -> dict[str, bool]:
    return {
        "lbfgs": goes_on(lambda m: torch.optim.LBFGS(m.parameters(), max_iter=2), stage=0),
        "lists": goes_on(lambda m: Lists(m.parameters()), stage=0),
        "named": goes_on(lambda m: torch.optim.AdamW(m.named_parameters()), stage=3),
        "amsgrad": goes_on(lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), stage=2),
        "tensor lr": goes_on(lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)), stage=3),
    }


def scalar_parameter() -> bool:
    """NAdam keeps a number for each parameter, and this parameter is one number."""
    path = folder()
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor(1.0)), "v": nn.Parameter(torch.ones(5))})
    model, optimizer = zf.prepare(model, torch.optim.NAdam(model.parameters()), stage=3)

    def once() -> None:
        with zf.full_params(model):
            (model["w"] * model["v"].sum()).backward()
        optimizer.step()

    once()
    zf.save(model, optimizer, path)
    zf.load(model, optimizer, path)
    once()
    zf.close(model)
    return True


def other_class() -> list[Any]:
    """Of another class the states are taken, and not what makes it that class."""
    path = folder()
    model = layers()
    model, optimizer = zf.prepare(model, torch.optim.Adam(model.parameters(), lr=0.5, amsgrad=True), stage=3)
    step(model, optimizer)
    zf.save(model, optimizer, path)
    zf.close(model)
    model = layers()
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3)
    zf.load(model, optimizer, path)
    step(model, optimizer)
    group = optimizer.param_groups[0]
    zf.close(model)
    return [group["lr"], group["amsgrad"], group["decoupled_weight_decay"]]


def odd_names() -> dict[str, bool]:
    path = folder()
    names = ["w", "w:64:96", "a b", "$w", "x/y", "ü", "piece/0-5/w"]
    torch.manual_seed(0)
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(96)) for name in names})
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), stage=3)
    with zf.full_params(model):
        sum((index + 1) * p.square().sum() for index, p in enumerate(model.values())).backward()
    optimizer.step()
    zf.save(model, optimizer, path)
    expected = weights(model)
    states = [zf.full(state["momentum_buffer"]) for state in optimizer.state.values()]
    with zf.full_params(model), torch.no_grad():
        for p in model.values():
            p.zero_()
    zf.load(model, optimizer, path)
    again = [zf.full(state["momentum_buffer"]) for state in optimizer.state.values()]
    found = {"weights": same(weights(model), expected), "states": same(again, states)}
    zf.close(model)
    return found


def shared(first: str, second: str) -> bool:
    """Tied by module, and not tied: each loads the other."""

    def make(kind: str) -> nn.Module:
        model = layers()
        model[0].register_buffer("seen", torch.arange(3.0))
        if kind == "module":
            model[2] = model[0]
        else:
            model[2].register_buffer("seen", torch.zeros(3))
        return zf.shard(model, stage=1, precision="bf16")

    path = folder()
    model = make(first)
    expected = zf.full(model[0].weight)
    zf.save(model, None, path)
    zf.close(model)
    model = make(second)
    zf.load(model, None, path)
    model.load_state_dict(model.state_dict())
    model(torch.ones(1, 16))
    found = torch.equal(zf.full(model[0].weight), expected) and bool(model[2].seen.sum() >= 0)
    zf.close(model)
    return found


def slow_copy(snapshot: Snapshot) -> None:
    time.sleep(0.3)
    original_copy(snapshot)


original_copy = Snapshot.copy


def races(stage: int) -> dict[str, bool]:
    """What is saved is what was there at the call, whoever changes it meanwhile."""
    found = {}
    with mock.patch.object(Snapshot, "copy", slow_copy):
        for case in ("step of an optimizer nobody named", "full_params", "average"):
            path = folder()
            model = zf.shard(layers(), stage=stage)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if stage < 3:
                zf.attach(model, optimizer)
            average = zf.EMA(model, decay=0.5)
            expected = weights(model)
            before = {name: zf.full(value) for name, value in average.state_dict().items()}
            zf.save(model, None, path, background=True)
            if case == "full_params":
                with zf.full_params(model), torch.no_grad():
                    model[0].weight.zero_()
            elif case == "average":
                average.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
            else:
                model(torch.ones(2, 16)).square().mean().backward()
                optimizer.step()
            zf.load(model, None, path)
            found[case] = same(weights(model), expected) and same(
                list(before.values()), [zf.full(value) for value in average.state_dict().values()]
            )
            zf.close(model)
    return found


def refused_scheduler() -> list[Any]:
    path = folder()
    model = layers()
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    zf.save(model, optimizer, path, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3))
    step(model, optimizer)
    expected, drawn = weights(model), torch.get_rng_state()
    other = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    try:
        zf.load(model, optimizer, path, scheduler=other)
        message = ""
    except zf.CheckpointError as error:
        message = str(error)
    found = [message, same(weights(model), expected), torch.equal(drawn, torch.get_rng_state())]
    zf.close(model)
    return found


def everything_rare() -> dict[str, Any]:
    return {
        "optimizers": optimizers(),
        "scalar": scalar_parameter(),
        "class": other_class(),
        "names": odd_names(),
        "shared": [shared("module", "none"), shared("none", "module")],
        "races": [races(stage) for stage in (0, 1, 3)],
        "scheduler": refused_scheduler(),
    }


def test_what_is_rare(ranks: RankPool) -> None:
    for found in ranks(2, everything_rare):
        assert all(found["optimizers"].values()), found["optimizers"]
        assert found["scalar"]
        assert found["class"] == [0.5, False, True]
        assert all(found["names"].values()), found["names"]
        assert found["shared"] == [True, True]
        assert all(all(each.values()) for each in found["races"]), found["races"]
        assert found["scheduler"][0].startswith("a state was refused: KeyError")
        assert found["scheduler"][1:] == [True, True]


def whole_cut(path: Path) -> bool:
    return goes_on(lambda m: Lists(m.parameters()), stage=2, cut="whole")


def test_owners_keep_lists_of_tensors(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, whole_cut, tmp_path) == [True, True]


def beside_others(path: Path) -> list[Any]:
    """Folders that are no checkpoints, a working folder that changes, and two models that save at once."""
    if dist.get_rank() == 0:
        (path / "data").mkdir()
        (path / "data" / "mine.txt").write_text("mine")
        (path / "save-00000001").mkdir()
    dist.barrier()
    one, other = zf.shard(layers(), stage=3), zf.shard(layers(1), stage=3)
    try:
        zf.save(one, None, path, tag="data")
        message = ""
    except zf.CheckpointError as error:
        message = str(error)
    before = Path.cwd()
    os.chdir(path)
    try:
        savings = [zf.save(model, None, ".", background=True) for model in (one, other)]
        os.chdir(before)
        for saving in savings:
            saving.wait()
    finally:
        os.chdir(before)
    for model in (one, other):
        zf.close(model)
    dist.barrier()
    return [message, sorted(entry.name for entry in path.iterdir()), (path / "data" / "mine.txt").exists()]


def test_nothing_of_others_is_touched(ranks: RankPool, tmp_path: Path) -> None:
    for message, names, is_there in ranks(2, beside_others, tmp_path):
        assert "data exists and is no checkpoint: move it away, or use another tag" in message
        assert names == ["data", "latest", "save-00000001", "save-00000002", "save-00000003"]
        assert is_there


TAMPERED: dict[str, Any] = {
    "outside": lambda body: body["files"][0].update(name="../x"),
    "negative size": lambda body: body["files"][0].update(bytes=-1),
    "no pieces": lambda body: body["tensors"]["model/0.weight"].update(pieces=[]),
    "other file": lambda body: body["tensors"]["model/0.weight"]["pieces"][0].__setitem__(0, -1),
    "beyond": lambda body: body["tensors"]["model/0.weight"]["pieces"][0].__setitem__(3, 10**12),
    "text": lambda body: body["tensors"]["model/0.weight"]["pieces"][0].__setitem__(1, "0"),
    "huge": lambda body: body["tensors"]["optimizer.0/exp_avg/0.weight"].update(shape=[10**13]),
    "other shape": lambda body: body["tensors"]["model/0.weight"].update(shape=[8, 32]),
    "extra": lambda body: body["plain"].update(extra=5),
    "unknown kind": lambda body: body["plain"].update(extra={"$code": "x"}),
    "groups": lambda body: body["plain"]["optimizers"][0].update(groups=3),
    "aliases": lambda body: body["plain"].update(aliases=[1]),
    "scaler": lambda body: body["plain"].update(scaler={"value": "x"}),
    "chunks": lambda body: body.update(chunk_bytes=1),
}


def tampered(path: Path) -> dict[str, str]:
    model = layers()
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3)
    step(model, optimizer)
    zf.save(model, optimizer, path, tag="only", extra={"a": 1})
    expected, found = weights(model), {}
    original = (path / "only" / "manifest.json").read_text()
    for case, change in TAMPERED.items():
        body = json.loads(original)
        change(body)
        rewrite(path / "only", body)
        try:
            zf.load(model, optimizer, path / "only")
            found[case] = "loaded"
        except zf.CheckpointError as error:
            found[case] = "" if str(path) in str(error) else str(error)
        except BaseException as error:
            found[case] = f"{type(error).__name__}: {error}"
    rewrite(path / "only", json.loads(original))
    found["unchanged"] = "" if same(weights(model), expected) else "the model was changed"
    found["whole"] = "; ".join(verify_native(path))
    zf.close(model)
    return found


def test_a_manifest_that_was_made_to_harm_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks(1, tampered, tmp_path)
    assert {case: said for case, said in found.items() if said} == {}


ENDS_AT_ONCE = """
import sys, torch, torch.distributed as dist, zerofold as zf
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
model = torch.nn.Linear(2000, 2000)
model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3)
zf.save(model, optimizer, sys.argv[1] + "/run", background=True)
"""


def test_a_process_that_ends_waits_for_its_checkpoint(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else None
    command = [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert verify_native(tmp_path / "run" / "save-00000001") == []


@pytest.mark.parametrize("stage", [0, 3])
def test_a_change_by_hand_during_the_copy_is_noticed(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    for message in ranks(2, changed_by_hand, tmp_path, stage):
        assert "was changed by hand while it was being copied" in message


def changed_by_hand(path: Path, stage: int) -> str:
    model = layers()
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), stage=stage)
    step(model, optimizer)
    with mock.patch.object(Snapshot, "copy", slow_copy):
        saving = zf.save(model, optimizer, path, background=True)
        for state in optimizer.state.values():
            state["momentum_buffer"].mul_(2)
        try:
            saving.wait()
            message = ""
        except zf.CheckpointError as error:
            message = str(error)
    zf.close(model)
    return message
