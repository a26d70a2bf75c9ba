"""zero.GatheredParameters: some parameters whole for a while, for everyone who holds them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn

from zerofold.comm import Comm
from zerofold.engine import Engine
from zerofold.fingerprints import fingerprint
from zerofold.guard import stand_in
from zerofold.sharded import ShardedParameter
from zerofold.slab import Slab
from zerofold.unit import Unit

Place = tuple[str, int, int]
"""Where a parameter stands among all: the same on every rank, whatever order it was given in."""


class GatheredParameters:
    """Inside, the given parameters are whole: `module.weight`, and the parameter itself for whoever holds it.

    params         a parameter, or several, as a list or generator. Those that zerofold does not have are left alone
    modifier_rank  the rank whose changes count: at the end all ranks take its values, masters included. With None
                   changes are dropped, and a warning names the first parameter that was changed
    fwd_module     a module in whose forward the parameters are used, though they belong to another. Any forward that
                   is under way is noticed by itself: there the unit of a parameter stays gathered until backward ends,
                   so that gradients arrive. Read the parameter from its module inside the context, not before
    enabled        False does nothing

    All ranks must enter with the same parameters, in any order. A context inside another may have parameters of it.
    After an error nothing is kept. Cut parameters have the dtype they show outside: fp32 masters under 16-bit
    precision; where parameters are whole (stages 0 to 2) one sees the 16-bit parameter, and what is changed in it is
    changed in its master. A forward inside computes with the values from before.

    >>> import torch, zerofold as zf
    >>> from zerofold.compat.gathered import GatheredParameters
    >>> model = zf.shard(torch.nn.Linear(64, 32), stage=3)
    >>> with GatheredParameters(model.weight, modifier_rank=0):
    ...     _ = torch.nn.init.ones_(model.weight)
    >>> zf.full(model.weight).sum().item()
    2048.0
    >>> zf.close(model)
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor | None],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._in_forward, self._modifier = fwd_module is not None, modifier_rank
        given = [params] if isinstance(params, Tensor) else list(params) if enabled else []
        for each in given:
            if each is not None and not isinstance(each, Tensor):
                raise TypeError(f"GatheredParameters takes parameters, not {type(each).__name__}")
        self._given = [each for each in given if each is not None] if enabled else []
        self._shown: list[_Shown] = []

    def __enter__(self) -> None:
        found: dict[Place, _Shown] = {}
        for parameter in self._given:
            shown = _look_at(parameter, self._in_forward)
            if shown is not None:
                found[shown.place] = shown
        self._shown = [found[place] for place in sorted(found)]
        for shown in self._shown:
            ranks = shown.comm.size
            if self._modifier is not None and not 0 <= self._modifier < ranks:
                self._shown = []
                raise ValueError(
                    f"GatheredParameters: modifier_rank={self._modifier} is no rank of '{shown.name}', which has 0 to "
                    f"{ranks - 1}"
                )
        entered: list[_Shown] = []
        try:
            for shown in self._shown:
                shown.begin(self._modifier)
                entered.append(shown)
        except BaseException:
            for shown in entered:
                shown.drop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shown, self._shown = self._shown, []
        if error is not None or self._modifier is None:
            changed = [each.name for each in shown if each.drop()]
            if changed and error is None:
                warnings.warn(
                    f"'{changed[0]}' was changed inside GatheredParameters without modifier_rank ({len(changed)} such "
                    "parameter(s)), and the changes are dropped: pass modifier_rank=0 to keep rank 0's",
                    stacklevel=2,
                )
            return
        engines = {id(each.engine): each.engine for each in shown if each.engine is not None}
        for engine in engines.values():
            engine.settle()
        for each in shown:
            each.keep(self._modifier)
        for engine in engines.values():
            engine.schedule.refresh()


class _Shown(Protocol):
    """One parameter, for the time of a context."""

    name: str
    place: Place
    comm: Comm  # the ranks among which a modifier is
    engine: Engine | None

    def begin(self, modifier: int | None) -> None: ...
    def drop(self) -> bool:
        """Ends it without changes; whether there were any."""

    def keep(self, modifier: int) -> None:
        """Ends it with this rank's values everywhere."""


def _look_at(parameter: Tensor, in_forward: bool) -> _Shown | None:
    if isinstance(parameter, ShardedParameter) and parameter.spec.loose is not None:
        return _Cut(parameter, ("", *parameter.spec.loose.place))
    engine = Engine.of_parameter(parameter)
    found = None if engine is None else engine.places().get(id(parameter))
    if engine is None or found is None:
        return None
    slab, index = found
    place = (engine.groups.control.group.group_name, engine.slabs().index(slab), index)
    (unit,) = [unit for unit in engine.schedule.units if slab in unit.slabs]
    schedule = engine.schedule
    if engine.row.parameters.is_cut and (schedule.holders or schedule.is_in_forward or in_forward):
        return _Lent(engine, unit, slab, index, place)
    if engine.row.parameters.is_cut and schedule.set_down(unit):
        return _CutByEngine(engine, slab, index, place)
    return _Whole(engine, unit, slab, index, place)


class _Cut:
    """A parameter of which a rank has its piece: a whole tensor is shown in the place of it."""

    engine: Engine | None = None

    def __init__(self, face: ShardedParameter, place: Place) -> None:
        self._face, self.name, self.place, self.comm = face, face.spec.name, place, face.spec.comm
        self._is_inner = face.whole is not None
        self._print: int | None = None

    def begin(self, modifier: int | None) -> None:
        if not self._is_inner:
            self._show(self._face.full_tensor())
        if modifier is None:
            self._print = fingerprint(self._whole)

    def drop(self) -> bool:
        changed = self._print is not None and self._print != fingerprint(self._whole)
        if not self._is_inner:
            self._show(None)
        return changed

    def keep(self, modifier: int) -> None:
        whole = self._whole
        self.comm.broadcast(whole.view(-1), modifier, unit=self.name).wait()
        if not self._is_inner:
            self._show(None)
        self._face.local.copy_(self._face.spec.cut(whole))

    @property
    def _whole(self) -> Tensor:
        assert self._face.whole is not None
        return self._face.whole

    def _show(self, whole: Tensor | None) -> None:
        self._face.show(whole)


class _CutByEngine(_Cut):
    """The same where the parameter is trained: its other face is shown whole too, and the next use gathers it anew."""

    def __init__(self, engine: Engine, slab: Slab, index: int, place: Place) -> None:
        face = slab.faces[index]
        assert isinstance(face, ShardedParameter)
        super().__init__(face, place)
        self.engine, self._slab, self._other = engine, slab, slab.parameters[index]
        self.comm = engine.groups.everyone  # also where each of several groups has all of it

    def begin(self, modifier: int | None) -> None:
        super().begin(modifier)
        if self._face.requires_grad and not hasattr(self._face, "_refuses_graphs"):
            # On the face itself: its own register_hook is for the parameter behind it.
            self._face._refuses_graphs = Tensor.register_hook(self._face, self._refuse_gradient)  # type: ignore[attr-defined]

    def keep(self, modifier: int) -> None:
        super().keep(modifier)
        self._slab.mark_changed()  # on all ranks, whether or not this one's piece has changed

    def _show(self, whole: Tensor | None) -> None:
        super()._show(whole)
        stand_in(self._other, whole)

    def _refuse_gradient(self, gradient: Tensor) -> NoReturn:
        raise RuntimeError(
            f"a loss depends on '{self.name}' as GatheredParameters showed it outside the model's forward, so its "
            "gradient would stay on this rank: compute that part inside the forward"
        )


class _Whole:
    """A parameter that every rank has, for good or until backward ends: changes must reach the others and the shard."""

    def __init__(self, engine: Engine, unit: Unit, slab: Slab, index: int, place: Place) -> None:
        self.engine: Engine | None = engine
        self._unit, self._slab, self._index = unit, slab, index
        self.name, self.place, self.comm = slab.entries[index].name, place, engine.groups.everyone
        self._parameter = slab.parameters[index]

    def begin(self, modifier: int | None) -> None:
        assert self.engine is not None
        if self._unit.releases and not self._unit.is_cut:
            self._unit.fetch(self._unit)  # and it stays: else the next parameter's unit might take its room
        else:
            self.engine.schedule.make_current(self._unit)
        self._before = self._parameter.detach().clone()

    def drop(self) -> bool:
        now = self._take_values()
        if _bits(now).equal(_bits(self._before)):
            return False
        now.copy_(self._before)
        self._slab.note_versions()
        return True

    def keep(self, modifier: int) -> None:
        now = self._take_values()
        self.comm.broadcast(now.view(-1), modifier, unit=self.name).wait()
        face = self._slab.faces[self._index]
        if self._slab.has_own_shard and isinstance(face, ShardedParameter):
            # What was left alone keeps the bits that 16 cannot hold.
            new, old = face.spec.cut(now), face.spec.cut(self._before)
            face.local.copy_(torch.where(new == old, face.local, new.to(face.dtype)))
        self._slab.note_versions()
        self._slab.mark_changed()

    def _take_values(self) -> Tensor:
        """The memory that is trained, with what somebody may have put in its place by `p.data = …`."""
        home, given = self._slab.view(self._index).data, self._parameter.data
        if not self._slab.holds(self._parameter):
            self._parameter.data = self._slab.view(self._index)
            if given.shape != home.shape:
                raise ValueError(
                    f"'{self.name}' {tuple(home.shape)} was given data of shape {tuple(given.shape)} inside "
                    "GatheredParameters: its shape cannot change any more"
                )
            home.copy_(given)
        return home


class _Lent:
    """A cut parameter while a forward or `full_params` is under way: its unit is gathered, and autograd knows it."""

    def __init__(self, engine: Engine, unit: Unit, slab: Slab, index: int, place: Place) -> None:
        self.engine: Engine | None = engine
        self._unit, self._parameter = unit, slab.parameters[index]
        self.name, self.place, self.comm = slab.entries[index].name, place, engine.groups.everyone
        self._is_held = engine.schedule.holders > 0

    def begin(self, modifier: int | None) -> None:
        if modifier is not None and not self._is_held:
            raise RuntimeError(
                f"GatheredParameters: '{self.name}' cannot be changed while a forward is under way: leave out "
                "modifier_rank, or change it outside"
            )
        assert self.engine is not None
        if not self._is_held:
            self.engine.schedule.lend(self._unit)

    def drop(self) -> bool:
        assert self.engine is not None
        if not self._is_held and not torch.is_grad_enabled():
            self.engine.schedule.take_back(self._unit)
        return False  # full_params takes changes in, and a forward has no place for them

    def keep(self, modifier: int) -> None:
        self.comm.broadcast(self._parameter.data.view(-1), modifier, unit=self.name).wait()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # also where some are NaN, which equal nothing
