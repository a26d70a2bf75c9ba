"""Which unit next: when to gather and when to release. It knows units and their placement, never a stage.

            unit 0        unit 1        unit 2            (parameters cut, forward)
gather   [g0][g1]      [g2] …                             ahead of use, as far as the live bytes allow
compute      [ f0     ][ f1     ][ f2     ]
release               x0        x1                        at once, except what backward uses first

The order of units is learned while running (`unit_order`); units that come in another are gathered on demand. All
decisions depend on what ranks have in common (order, sizes), never on time, so that all ranks make the same calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from weakref import WeakMethod

import torch

from zerofold.reduction_order import ReductionOrder
from zerofold.timing import Clock
from zerofold.unit import State, Unit
from zerofold.unit_order import UnitOrder


def in_backward() -> bool:
    """Whether autograd is running on this thread; then a module's forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Schedule:
    """Gathers ahead and releases behind.

    A unit is not released while it is pinned, for one of these reasons:

    in use      a forward or a backward of it is running
    kept        until backward ends: autograd may come back to it unannounced, or a module inside it was called by
                itself (then it is lent)
    staying     for good: somebody may hold an alias of its parameters
    holders     all units, inside full_params
    """

    def __init__(
        self, units: list[Unit], reductions: ReductionOrder, clock: Clock, *, live_bytes: int, overlap: bool
    ) -> None:
        self.units, self.reductions, self.clock = units, reductions, clock
        self.root = units[0]
        self.live_bytes, self.overlap = live_bytes, overlap
        self.holders = 0  # full_params contexts we are in: everything stays gathered
        self.shows_masters = False  # in them, instead of what forward computes with otherwise
        self.peak_live_bytes = 0
        self.retraces = False  # forwards are recomputations for a backward, outside of autograd too
        self._order = UnitOrder(units)
        self._in_forward: Counter[Unit] = Counter()  # calls under way
        self._in_backward: Counter[Unit] = Counter()
        self._kept: set[Unit] = set()
        self._lent: set[Unit] = set()  # among the kept
        self._staying: set[Unit] = set()
        self._live = 0
        self._stepped: list[object] = []  # optimizers, since parameters or gradients were last used
        self._followed: set[object] = set()  # optimizers that another one came after last time
        self._is_alone = all(slab.comm.size == 1 for unit in units for slab in unit.slabs)
        # Not the method itself: the schedule and its units would keep each other for the garbage collector.
        link: WeakMethod[Callable[[Unit], None]] = WeakMethod(self._stay)
        for unit in units:
            unit.fetch = partial(_fetch, link)

    # forward

    def before_forward(self, unit: Unit) -> None:
        if not self._goes_back() and unit not in self._in_forward:
            self._order.enter(unit)
        self._use(unit, self._in_forward)
        if self.clock.tape is not None:
            self.clock.tape.take_sample(unit, at=self.clock.tape.forward(unit.name))

    def after_forward(self, unit: Unit, *, expects_backward: bool, keep: bool) -> None:
        """`keep`: what came out may lead autograd back here without passing a hook."""
        if self.clock.tape is not None:
            self.clock.tape.take_sample(unit, at=self.clock.tape.forward_ends(unit.name))
        self._in_forward = self._in_forward - Counter([unit])
        if unit not in self._in_forward and not self._goes_back():
            self._order.leave(unit)
        if keep:
            self._kept.add(unit)
        if self._goes_back() or self._is_pinned(unit):
            return
        if unit is self.root and not expects_backward:
            self._forget(self.units)
            self.release_all()
        elif unit is not self.root and not (unit.is_cut and self._is_needed_soon(unit, expects_backward)):
            self._release(unit)
        self._prefetch(expects_backward)

    # backward

    def before_backward(self, unit: Unit) -> None:
        self._order.come_back(unit)
        self._use(unit, self._in_backward)
        if self.clock.tape is not None:
            self.clock.tape.take_sample(unit, at=self.clock.tape.backward(unit.name))

    def after_backward(self, unit: Unit) -> None:
        self._in_backward = self._in_backward - Counter([unit])
        if self.clock.tape is not None:
            self.clock.tape.take_sample(unit)
        if unit is not self.root and not self._is_pinned(unit):
            self._release(unit)
            self._prefetch(expects_backward=True)

    def end_backward(self) -> None:
        if self.clock.tape is not None:
            self.clock.tape.backward_ends()
            self.clock.tape.take_sample()
        self._in_backward.clear()
        self._forget(self.units)
        self.release_all()
        if self.clock.tape is not None:
            self.clock.tape.take_sample(self.root)  # without what was gathered

    def forget_forward(self) -> None:
        """One that was interrupted: its units are in use no more."""
        self._in_forward.clear()
        self.release_all()

    def end_accumulation(self) -> None:
        self.retraces = False
        self._in_forward.clear()

    # gathering

    def stepped(self, optimizer: object) -> None:
        """Parameters are refreshed once for all optimizers that share the model.

        So it is left to the last one, as far as the order of the step before tells; when that guess is wrong, the next
        use fetches, and until then the parameters cannot be read.
        """
        self._stepped.append(optimizer)
        self.refresh(is_last=optimizer not in self._followed or self.holders > 0)

    def refresh(self, *, is_last: bool = True) -> None:
        """Starts fetching the ranges that other ranks have just updated; each unit's next use waits for its own."""
        self.wait_all()  # a unit this rank has not used since the last refresh is still on its way
        for unit in self.units:  # in an order that ranks share, whatever order each ran them in
            if not unit.is_stale or unit.state is State.RELEASED:
                continue
            if self._is_alone and any(slab.update is not None for slab in unit.slabs):
                # Its next use waits for its own update, not this step for all of them. With other ranks it would have
                # to be gathered then, and a rank that reads a parameter by itself would wait for them in vain.
                unit.fetch_when_touched()
            elif is_last:
                self._gather(unit)
            else:
                unit.refuse_stale()

    def end_steps(self) -> None:
        """A forward or a backward begins, so the optimizers are through with their steps."""
        if self._stepped:
            *before, last = self._stepped
            self._followed = (self._followed | set(before)) - {last}
            self._stepped = []

    def lend(self, unit: Unit) -> None:
        """Gathers a unit for a call of a module inside it, and keeps it until backward ends or it is taken back."""
        self.make_current(unit)
        if unit not in self._kept:
            self._kept.add(unit)
            self._lent.add(unit)

    def take_back(self, unit: Unit) -> None:
        if unit in self._lent:
            self._forget([unit])
            self._release(unit)

    def set_down(self, unit: Unit) -> bool:
        """Releases a unit that was kept for a later use; whether it is released now."""
        self._release(unit)
        return unit.state is State.RELEASED

    def is_kept(self, unit: Unit) -> bool:
        """Gathered, current, and staying so."""
        return unit in self._kept and unit.state is State.READY and not unit.is_stale

    def _forget(self, units: list[Unit]) -> None:
        self._kept.difference_update(units)
        self._lent.difference_update(units)

    def resized(self, unit: Unit, by: int) -> None:
        """A gathered unit has got other slabs, which take more or less memory."""
        self._live += by

    def wait_all(self) -> None:
        for unit in self.units:
            if unit.state is State.GATHERING:
                unit.wait()

    def hold_all(self, *, masters: bool) -> None:
        """Gathers everything and keeps it until `let_go`. The outermost call decides what is shown."""
        self.shows_masters = masters if self.holders == 0 else self.shows_masters
        self.holders += 1
        for unit in self.units:
            self.make_current(unit)

    def let_go(self) -> None:
        self.holders -= 1
        if self.holders == 0 and self.shows_masters:
            self.shows_masters = False
            for unit in self.units:
                unit.hide_masters()
            self.release_all()
            self.refresh()
            return
        self.release_all()

    def release_all(self) -> None:
        for unit in self.units:
            self._release(unit)

    @property
    def live(self) -> int:
        """Bytes of gathered parameters now."""
        return self._live

    @property
    def is_in_forward(self) -> bool:
        return bool(self._in_forward)

    def is_in_use(self, unit: Unit) -> bool:
        return unit in self._in_forward or unit in self._in_backward

    def _is_pinned(self, unit: Unit) -> bool:
        return self.is_in_use(unit) or unit in self._kept or unit in self._staying or self.holders > 0

    def _stay(self, unit: Unit) -> None:
        """Somebody touched released parameters, which are not cut, outside their unit. That may have left an alias of
        them (in a state dict, in a graph), so their memory stays from now on. It is also why such a unit is never
        gathered ahead or kept for later: a touch of parameters that are ready would go unnoticed.
        """
        self._staying.add(unit)
        self.make_current(unit)

    def _use(self, unit: Unit, uses: Counter[Unit]) -> None:
        uses[unit] += 1
        self.make_current(unit)
        self._prefetch(torch.is_grad_enabled())

    def make_current(self, unit: Unit) -> None:
        """Gathers a unit that is released or out of date, and waits for it."""
        if unit.state is State.GATHERING:
            unit.wait()
        shows_others = unit.has_masters and unit.shows_masters != self.shows_masters
        if unit.state is State.RELEASED or unit.is_stale or shows_others:
            self._make_room(unit.full_nbytes if unit.state is State.RELEASED else 0)
            self._gather(unit)
            unit.wait()

    def _gather(self, unit: Unit) -> None:
        if unit.state is State.RELEASED:
            self._live += unit.full_nbytes
            self.peak_live_bytes = max(self.peak_live_bytes, self._live)
        unit.gather(masters=self.shows_masters)
        self.reductions.note_gather(unit)
        if not self.overlap:
            unit.wait()

    def _prefetch(self, expects_backward: bool) -> None:
        if not self.overlap or not any(unit.releases for unit in self.units):
            return
        for unit in self._upcoming(expects_backward):
            if unit.state is State.RELEASED and unit.is_cut:
                if self._live + unit.full_nbytes > self.live_bytes:
                    return
                if self._is_alone and not unit.is_at_hand:
                    return  # other ranks would have to decide alike, and wait instead
                self._gather(unit)

    def _release(self, unit: Unit) -> None:
        """Unless it is pinned."""
        if unit.releases and unit.state is not State.RELEASED and not self._is_pinned(unit):
            unit.wait()
            unit.release()
            self._live -= unit.full_nbytes

    def _make_room(self, nbytes: int) -> None:
        """Releases what was gathered ahead, or kept for a later use, before live bytes would pass their bound."""
        for unit in self.units:
            if self._live + nbytes <= self.live_bytes:
                return
            self._release(unit)

    def _goes_back(self) -> bool:
        """Whether units are needed in the reverse order, their forwards included: those are recomputations."""
        return self.retraces or in_backward()

    def _upcoming(self, expects_backward: bool) -> Iterator[Unit]:
        if self._goes_back():
            return self._order.ahead_in_backward()
        return self._order.ahead_in_forward(expects_backward=expects_backward)

    def _is_needed_soon(self, unit: Unit, expects_backward: bool) -> bool:
        """Whether the units used from now until this one's next use fit the bound together with it."""
        counted = {other for other in self.units if self._is_pinned(other)}
        total = sum(other.full_nbytes for other in counted)
        for other in self._upcoming(expects_backward):
            if other not in counted:
                counted.add(other)
                total += other.full_nbytes
            if total > self.live_bytes:
                return False
            if other is unit:
                return True
        return False


def _fetch(stay: WeakMethod[Callable[[Unit], None]], unit: Unit) -> None:
    (stay() or Unit.wait)(unit)
