"""zf.checkpoint_blocks: the blocks of a model checkpointed where they are called, before or after it is sharded.

A block gets a class of its own that differs in `__call__` alone, as torch's FSDP2 does it: names, hooks and isinstance
stay as they are. The checkpoint is around the hooks, so that what gathers a unit runs again with it.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from zerofold.activation.automatic import Automatic
from zerofold.activation.caches import NoCaches
from zerofold.activation.chains import NO_BLOCKS, NO_CHAIN, first_of, groups_of, run_in_turn, same_but_first
from zerofold.activation.checkpointing import Policy, checkpoint
from zerofold.activation.held import Held
from zerofold.activation.partition import Partition
from zerofold.activation.store import CheckpointStore
from zerofold.activation.wishes import AUTO, check_blocks, check_model, look_together, read_budget
from zerofold.engine import Engine
from zerofold.parallel.marks import sequence_ranks
from zerofold.parallel.mesh import Mesh
from zerofold.traffic import Traffic
from zerofold.units import UnitChoice, find_units

_ON_MODEL = "_zerofold_checkpointing"
_ON_BLOCK = "_zerofold_checkpointed"


def checkpoint_blocks(
    model: nn.Module,
    every: int = 1,
    *,
    policy: Policy | None = None,
    keep: str = "device",
    contiguous: bool = False,
    path: str | os.PathLike[str] | None = None,
    partition: Mesh | None = None,
    units: UnitChoice = None,
    use_reentrant: bool = False,
    budget: int | str | None = None,
) -> Checkpointing:
    """From now on the model's blocks forget what they compute in forward, and compute it again in backward.

    every          blocks that are computed again from one kept input; several must follow each other, each called
                   with the same arguments but for the stream
    policy         what of the inside is kept all the same, see `zf.checkpoint`
    keep           where the inputs wait for backward: "device", "host" (pinned memory; on the device are those of two
                   blocks at most), "nvme", or "auto": the first of them that leaves room for the rest of a step, as the
                   plan says when a forward shows how large they are; a line says which, and why
    contiguous     with keep="device": in one block of memory for all of a step, used again in the next
    path           the folder for keep="nvme", without which "auto" does not go there
    budget         with keep="auto": what training may take of the device, in bytes or as "40GiB"; by default all
    partition      a `zf.mesh`: of inputs that the ranks along its tensor axis hold alike, each keeps its part, wherever
                   `keep` says ("auto": if they would not fit whole); they are rebuilt by an all-gather one block ahead
                   of their use. All ranks must call it.
    units          which modules are blocks, as for `zf.prepare`; by default the units of a sharded model, and the
                   repeated blocks of any other
    use_reentrant  as torch means it: gradients of what several blocks take (an encoder's result, the bias of T5) are
                   added up in another order

    Call it before `zf.prepare` or after. Losses and other gradients stay as they are, to the bit. What comes back ends
    it with `remove()`, and shows what is kept. Without gradients (evaluation, generation) blocks run as before; inside
    `zf.accumulate`, which computes units again itself, too. With `every` over 1, what a model reads between the blocks
    of a group is the end of the group.

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    >>> checkpointing = zf.checkpoint_blocks(model, every=2, keep="host")
    >>> loss = model(torch.ones(1, 8, requires_grad=True)).sum()
    >>> checkpointing.groups, checkpointing.nbytes["host"]
    (2, 8192)
    >>> loss.backward(); checkpointing.remove()
    """
    check_model("checkpoint_blocks", model)
    engine = getattr(model, "_zerofold_engine", None)
    is_cut = isinstance(partition, Mesh) and partition.tensor > 1

    def look() -> tuple[dict[str, nn.Module], int | None]:
        check_blocks(every, policy, keep, contiguous, path, partition, use_reentrant)
        most = read_budget(budget, keep)
        return _blocks_to_take(model, units), most

    if is_cut and isinstance(engine, Engine):  # by calls that are watched, as the making of groups after them is not
        settings = f"every={every}, keep={keep!r}, contiguous={contiguous}, use_reentrant={use_reentrant}"
        settings += f", path={'a folder' if path else path}, budget={budget!r}"
        blocks, most = look_together(engine.groups.job, look, settings)
    else:
        blocks, most = look()
    if any(getattr(module, "gradient_checkpointing", False) for module in blocks.values()):
        warnings.warn(
            "checkpoint_blocks: the model checkpoints its blocks itself: they would be computed three times; call "
            "model.gradient_checkpointing_disable() first",
            stacklevel=2,
        )
    if partition is not None and sequence_ranks(model) > 1:
        warnings.warn(
            f"partition=: each of {sequence_ranks(model)} tensor ranks has a part of the sequence between the blocks "
            "(sequence_parallel=True), so there is nothing left to cut, and inputs are kept as they are",
            stacklevel=2,
        )
        partition, is_cut = None, False
    is_stored = keep != AUTO and (keep != "device" or contiguous or is_cut)
    store = CheckpointStore(keep, path=path, partition=partition) if is_stored else None
    run: Callable[..., Any] = partial(checkpoint, use_reentrant=use_reentrant, policy=policy)
    auto = None
    if keep == AUTO:
        parts = None if partition is None else Partition.over(partition, has_files=path is not None)
        found = weakref.ref(model)
        run = auto = Automatic(blocks, every, path=path, budget=most, model=found, run=run, parts=parts)
    else:
        run = partial(run, store=store)
    names = {module: name for name, module in blocks.items()}
    groups = [_Group(modules, run, names[modules[0]]) for modules in groups_of(blocks, every)]
    return Checkpointing(model, groups, auto, store)


class Checkpointing:
    """What `checkpoint_blocks` has put on a model. It ends with the model, or with `remove`.

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    >>> checkpointing = zf.checkpoint_blocks(model, contiguous=True)
    >>> loss = model(torch.ones(16, 8, requires_grad=True)).sum()
    >>> checkpointing.nbytes, checkpointing.arena_nbytes
    ({'device': 2048, 'host': 0, 'nvme': 0}, 2048)
    >>> loss.backward(); checkpointing.nbytes["device"]
    0
    >>> checkpointing.remove()
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[_Group],
        auto: Automatic | None,
        store: CheckpointStore | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._auto, self._store = auto, store
        self._held = Held() if auto is None else auto.held
        if store is not None:
            self._held.add(store)
        self._modules = [module for group in groups for module in group.modules]
        self.groups = len(groups)
        """Inputs that are kept in a forward, where blocks take one each."""
        self.first_blocks = [group.modules[0] for group in groups]
        """Those whose inputs are kept."""
        for group in groups:
            group.checkpointing = self
            for index, module in enumerate(group.modules):
                _turn_into(module, _Member(group, index))
        setattr(model, _ON_MODEL, self)
        engine = getattr(model, "_zerofold_engine", None)
        if isinstance(engine, Engine):
            self.count_in(engine.traffic)

    @property
    def store(self) -> CheckpointStore | None:
        """Where inputs wait; None where autograd itself keeps them, on the device."""
        return self._stores[-1] if self._stores else None

    @property
    def _stores(self) -> list[CheckpointStore]:
        if self._auto is not None:
            return self._auto.stores
        return [] if self._store is None else [self._store]

    @property
    def choice(self) -> str:
        """With keep="auto": what was chosen and why; nothing before the first forward."""
        chosen = None if self._auto is None else self._auto.choice
        return "" if chosen is None else chosen.sentence

    def remove(self) -> None:
        """From here on blocks keep what they compute. The memory of the store is given back."""
        for store in self._stores:
            store.close()
        self.count_in(None)
        for module in self._modules:
            vars(module).pop(_ON_BLOCK, None)
            plain: Any = getattr(type(module), "_zerofold_plain", None)
            if plain is not None and type(module) is _checkpointed(plain):  # not of another class on top of it
                module.__class__ = plain
        model = self._model()
        if model is not None and vars(model).get(_ON_MODEL) is self:
            delattr(model, _ON_MODEL)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of kept inputs now, by tier. Those that autograd itself keeps on the device are not counted."""
        return self._held.nbytes

    @property
    def peak_nbytes(self) -> dict[str, int]:
        """The most of them at one moment, for each tier its own."""
        return self._held.peak_nbytes

    @property
    def arena_nbytes(self) -> int:
        """Of the contiguous block on the device, used or not."""
        return sum(store.arena_nbytes for store in self._stores)

    @property
    def sent_nbytes(self) -> int:
        """What this rank has sent to rebuild inputs that were cut, as a ring would send it."""
        return 0 if self._partition is None else self._partition.sent_nbytes

    @property
    def is_cut(self) -> bool:
        """Inputs are kept in parts, by tensor ranks that hold them alike."""
        return self.store is not None and self.store.partition is not None

    def count_in(self, traffic: Traffic | None) -> None:
        """What is sent to rebuild inputs counts there too, from now on."""
        if self._partition is not None:
            self._partition.count_in(traffic)

    @property
    def _partition(self) -> Partition | None:
        if self._auto is not None:
            return self._auto.parts
        return None if self._store is None else self._store.partition

    def is_on(self) -> bool:
        model = self._model()
        engine = None if model is None else getattr(model, "_zerofold_engine", None)
        is_accumulating = isinstance(engine, Engine) and engine.hooks.is_accumulating
        return torch.is_grad_enabled() and not is_accumulating

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # a copy of the model is one without


def _nothing() -> None:
    """In place of what belongs to another model."""


class _Group:
    """Blocks that are computed again together, from the input of the first."""

    def __init__(self, modules: list[nn.Module], run: Callable[..., Any], name: str) -> None:
        self.modules, self.name = modules, name
        self.checkpointing: Checkpointing | None = None
        self._calls = [partial(_plain_call, module) for module in modules]
        self._plain_run = run
        self._without_caches = NoCaches(modules).of
        self._given: tuple[Any, Any] | None = None  # with what the first was called, until the last has passed
        self._result: Any = None
        self._turn = _Turn(self._calls)

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.checkpointing is None or not self.checkpointing.is_on():
            return self._calls[index](*args, **kwargs)
        args, kwargs = self._without_caches(args, kwargs)
        if index == 0:
            self._given = self._result = None  # of a forward that raised
            self._turn = turn = _Turn(self._calls)
            result = self._run(turn.run, *args, **kwargs)
            turn.is_made = True
            if len(self._calls) > 1:
                self._given, self._result = (args, kwargs), result
            return result
        if self._given is None:  # by itself, without the blocks before
            return self._run(self._calls[index], *args, **kwargs)
        return self._pass(index, args, kwargs)

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self.checkpointing is not None
        store = self.checkpointing.store
        if store is not None and not store.depth:
            store.name = self.name
        if isinstance(self._plain_run, Automatic):
            self._plain_run.comes_to(self.name)
        return self._plain_run(fn, *args, **kwargs)

    def _pass(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This block has been computed with the first: what comes in is what goes out."""
        result, given = self._result, self._given
        assert given is not None
        is_next = index == self._turn.called and first_of((args, kwargs)) is first_of(result)
        if not is_next or not same_but_first(given, (args, kwargs)):
            self._given = self._result = None
            raise ValueError(NO_CHAIN)
        self._turn.called += 1
        if index == len(self._calls) - 1:
            self._given = self._result = None
        return result


class _Turn:
    """All blocks of a group, computed by the call of the first. Made again only if the model has called each of them:
    else what came of the first is not what the model asked for.
    """

    def __init__(self, calls: Sequence[Callable[..., Any]]) -> None:
        self._calls = calls
        self.called, self.is_made = 1, False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_made and self.called < len(self._calls):
            raise ValueError(NO_CHAIN)
        return run_in_turn(self._calls, args, kwargs)


class _Member:
    """Which block of which group a module is."""

    def __init__(self, group: _Group, index: int) -> None:
        self.group, self.index = group, index


def computed_again_with(block: nn.Module) -> list[nn.Module]:
    """The group of a block that is checkpointed; none for others."""
    member: _Member | None = vars(block).get(_ON_BLOCK)
    return [] if member is None else member.group.modules


def _blocks_to_take(model: nn.Module, units: UnitChoice) -> dict[str, nn.Module]:
    if getattr(model, _ON_MODEL, None) is not None:
        raise ValueError("checkpoint_blocks was called on this model already: call remove() on what it returned first")
    blocks = _blocks_of(model, units)
    twice = next((name for name, module in blocks.items() if _ON_BLOCK in vars(module)), None)
    if twice is not None:
        raise ValueError(f"checkpoint_blocks: {twice!r} is checkpointed already: call remove() on what came back first")
    if not blocks:
        raise ValueError(NO_BLOCKS)
    return blocks


def _blocks_of(model: nn.Module, units: UnitChoice) -> dict[str, nn.Module]:
    engine = getattr(model, "_zerofold_engine", None)
    if units is None and isinstance(engine, Engine):
        found = {unit.name: unit.module for unit in engine.units if unit.module is not model}
    else:
        found = find_units(model, units)
    inner = {name for name in found if any(name.startswith(f"{other}.") for other in found)}
    return {name: module for name, module in found.items() if name not in inner}


def _new(plain: Any, *args: Any) -> Any:
    return plain.__new__(plain, *args)


def _turn_into(module: nn.Module, member: _Member) -> None:
    vars(module)[_ON_BLOCK] = member
    plain: Any = type(module)
    module.__class__ = _checkpointed(plain)


def _plain_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """With the module's hooks, past its checkpoint."""
    plain: Any = getattr(type(module), "_zerofold_plain", type(module))
    return plain.__call__(module, *args, **kwargs)


@cache
def _checkpointed(plain: Any) -> type[nn.Module]:
    """The class in another form: a call goes through the group of the module."""

    class Checkpointed(plain):
        __doc__ = plain.__doc__
        _zerofold_plain = plain

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            member: _Member | None = vars(self).get(_ON_BLOCK)
            if member is None:
                return plain.__call__(self, *args, **kwargs)
            return member.group.call(member.index, args, kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Copied and pickled as what it was."""
            made = list(super().__reduce_ex__(protocol))
            made[:2] = _new, tuple(plain if each is type(self) else each for each in made[1])
            made[2:3] = [{key: value for key, value in state.items() if key != _ON_BLOCK} for state in made[2:3]]
            return tuple(made)

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Checkpointed, name, getattr(plain, name))
    return Checkpointed
