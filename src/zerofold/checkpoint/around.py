"""What is restored besides tensors: schedulers, the loss scale, random generators, the position in the data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from zerofold.checkpoint.contents import CheckpointError, Contents
from zerofold.checkpoint.generators import random_states, set_random_states
from zerofold.checkpoint.together import together
from zerofold.comm import Comm
from zerofold.engine import Engine


class SchedulersDifferError(CheckpointError):
    """There are more or fewer schedulers than there were; nothing has been changed yet."""


Change = tuple[Callable[[], None], Callable[[], None]]
"""Something to do, and how to undo it."""


def changes_around(
    engine: Engine, contents: Contents, given: list[Any] | None, data: Any, optimizers: list[torch.optim.Optimizer]
) -> list[Change]:
    """With no optimizer, only what was asked for by name. With None in place of schedulers, all of them stay."""
    saved, job = contents.plain.get("schedulers"), engine.groups.job
    schedulers = _schedulers(engine, given, optimizers)
    loaded = (saved or [])[-len(schedulers) :] if schedulers else []
    found = [_restoring(scheduler, state) for scheduler, state in zip(schedulers, loaded, strict=False)]
    if optimizers and contents.plain.get("scaler") is not None:
        before = engine.scaler.state_dict()
        found.append((lambda: engine.set_scaler(contents.plain["scaler"]), lambda: engine.set_scaler(before)))
    if optimizers and job.rank < contents.ranks:
        device, own = engine.groups.gather.device, contents.of_rank(job.rank)["rng"]
        now = random_states(device)
        found.append((partial(set_random_states, own, device), partial(set_random_states, now, device)))
    if data is not None:
        found.append(_restoring(data, _position(contents, data, engine)))
    return found


def check_schedulers(
    engine: Engine, contents: Contents, given: list[Any] | None, optimizers: list[torch.optim.Optimizer]
) -> None:
    saved, here = contents.plain.get("schedulers"), _schedulers(engine, given, optimizers)
    if given is None or saved is None:
        return
    if len(saved) != len(here) if optimizers else len(saved) < len(here):
        raise SchedulersDifferError(
            f"{contents.where} holds the state of {len(saved)} scheduler(s), and there are {len(here)} here: "
            "give those that it was saved with as scheduler= (or to zf.attach), or scheduler=False to leave them"
        )


def _schedulers(engine: Engine, given: list[Any] | None, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    if given is None:
        return []
    return [*engine.schedulers, *given] if optimizers else given


def _restoring(target: Any, state: Any) -> Change:
    before = copy.deepcopy(target.state_dict())
    return partial(target.load_state_dict, state), partial(target.load_state_dict, before)


def all_or_nothing(control: Comm, find: Callable[[], list[Change]]) -> None:
    """All of it on every rank, or none on any: the objects are the user's, and may refuse."""
    undo: list[Callable[[], None]] = []

    def run() -> None:
        for do, back in find():
            undo.append(back)
            try:
                do()
            except Exception as error:
                raise CheckpointError(f"a state was refused: {type(error).__name__}: {error}") from error

    try:
        together(control, run)
    except Exception:
        for back in undo:
            with suppress(Exception):  # it has refused already
                back()
        raise


def _position(contents: Contents, data: Any, engine: Engine) -> Any:
    rank, world = engine.groups.job.rank, engine.groups.job.size
    if not callable(getattr(data, "load_state_dict", None)):
        raise TypeError(f"data: {type(data).__name__} has no load_state_dict(), so its state cannot be loaded")
    own = contents.of_rank(min(rank, contents.ranks - 1)).get("data") if contents.ranks else None
    if own is None:
        raise CheckpointError(f"{contents.where} holds no position in the data: it was saved without data=")
    data_ranks = contents.plain.get("about", {}).get("data_ranks", contents.ranks)  # older ones knew no other axis
    if world == contents.ranks and engine.groups.control.size == data_ranks:
        return own
    for other in range(contents.ranks):
        if not _same(contents.of_rank(other).get("data"), own):
            raise CheckpointError(
                f"{contents.where} holds the position in the data of each of {contents.ranks} ranks, and there are "
                f"{world} now, {engine.groups.control.size} of them with data of their own: use data that does "
                "not depend on the number of ranks (zf.Samples), or leave data= out"
            )
    return own


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
