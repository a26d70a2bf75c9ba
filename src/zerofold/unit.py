"""One unit: the parameters gathered, released and reduced together, and its checked states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

from torch import Tensor, nn

from zerofold.comm import Handle
from zerofold.entry import Entry, Waitable
from zerofold.guard import guard, unguard
from zerofold.placement import Row
from zerofold.sharded import ShardedParameter
from zerofold.slab import Slab
from zerofold.timing import Clock


class State(Enum):
    RELEASED = "released"
    GATHERING = "gathering"
    READY = "ready"


_ALLOWED = {
    (State.RELEASED, State.GATHERING),
    (State.GATHERING, State.READY),
    (State.READY, State.GATHERING),  # whole parameters refreshed after a step, or a shard changed while gathered
    (State.READY, State.RELEASED),
}


class Unit:
    """A module and those of its parameters that no unit inside it has taken."""

    def __init__(self, name: str, module: nn.Module, slabs: list[Slab], row: Row, index: int) -> None:
        self.name, self.module, self.slabs, self.index = name, module, slabs, index
        self.clock = slabs[0].clock if slabs else Clock()
        self.is_cut = row.parameters.is_cut
        # Called when somebody touches a parameter that is released though it is not cut, as on a rank alone.
        self.fetch: Callable[[Unit], None] = Unit.wait
        self._look_at_slabs()
        self._refusals: dict[str, Callable[[], None]] = {}
        self._state = State.READY
        self.shows_masters = False  # in place of what forward computes with
        self._handles: list[Waitable] = []
        if self.releases:
            self.release()

    @property
    def state(self) -> State:
        return self._state

    def _enter(self, state: State) -> None:
        if (self._state, state) not in _ALLOWED:
            raise AssertionError(f"unit '{self.name}' cannot go from {self._state.value} to {state.value}")
        self._state = state

    def _look_at_slabs(self) -> None:
        self.has_masters = any(slab.dtypes.has_master for slab in self.slabs)
        # Whether its parameters go after use. Alone, a rank can make them anew from its masters: they need not stay.
        comes_back = [slab for slab in self.slabs if slab.dtypes.has_master and slab.comm.size == 1]
        self.releases = self.is_cut or any(not slab.is_kept for slab in comes_back)
        released = [slab for slab in self.slabs if slab.is_temporary] if self.releases else []
        self.full_nbytes = sum(slab.storage.full_nbytes for slab in released)  # what gathering it takes

    @property
    def trainable_slabs(self) -> list[Slab]:
        return [slab for slab in self.slabs if slab.requires_grad]

    @property
    def is_stale(self) -> bool:
        return any(slab.is_stale for slab in self.slabs)

    @property
    def is_at_hand(self) -> bool:
        """Whether gathering it would not keep the host waiting for an update."""
        return all(slab.update is None or slab.update.is_near for slab in self.slabs)

    def fetch_when_touched(self) -> None:
        """Whole parameters are being updated elsewhere: who reads one before its unit runs waits for them."""
        self._guard(self._touched)

    def gather(self, *, masters: bool = False) -> None:
        """Starts to complete the storage from all ranks' shards; `wait` ends it."""
        everything = self.is_cut or self._state is State.RELEASED or masters != self.shows_masters
        is_shown = not self.is_cut or self._state is State.READY  # whole Parameters are in the module already
        self._enter(State.GATHERING)
        handles = [slab.start_gather(masters=masters) for slab in self.slabs if everything or slab.is_stale]
        self._handles = [handle for handle in handles if handle is not None]
        self.shows_masters = masters
        if is_shown:
            self._guard(self.wait)

    def wait(self) -> None:
        """Returns with the parameters ready to use; whole Parameters are in the module."""
        if self._state is State.READY:
            return
        for handle in self._handles:
            self._wait_for(handle)
        self._handles = []
        self._enter(State.READY)
        for slab in self.slabs:
            slab.after_gather()
            for entry, face in self._faces(slab):
                unguard(entry.parameter)
                if self.is_cut:
                    if face.requires_grad != entry.parameter.requires_grad:  # the user froze it, or thawed it again
                        entry.parameter.requires_grad_(face.requires_grad)
                    _put(entry, entry.parameter, instead_of=face)

    def _wait_for(self, handle: Waitable) -> None:
        if isinstance(handle, Handle):  # a collective writes down its own wait
            handle.wait()
            return
        with self.clock.spent(handle.waits_for, self.name):
            handle.wait()

    def release(self) -> None:
        """Frees the gathered memory; where it is cut, the module shows the sharded parameters."""
        self._enter(State.RELEASED)
        for slab in self.slabs:
            for entry, face in self._faces(slab) if self.is_cut else ():
                if face.requires_grad != entry.parameter.requires_grad:  # set on what the module showed until now
                    face.requires_grad_(entry.parameter.requires_grad)
                _put(entry, face, instead_of=entry.parameter)
            slab.hide_masters()
            if slab.is_temporary:
                slab.storage.free()
        self.shows_masters = False
        self._guard(None if self.is_cut else self._touched)

    def hide_masters(self) -> None:
        """For parameters that are not released: back to what forward computes with, stale if it has changed."""
        for slab in self.slabs:
            slab.hide_masters()
        self.shows_masters = False

    def refuse_stale(self) -> None:
        """Whole parameters that other ranks have changed may not be read until they are gathered."""
        for slab in self.slabs:
            if slab.is_stale:
                for entry in slab.entries:
                    guard(entry.parameter, self._refusal(entry.name))

    def replace_slabs(self, old: list[Slab], new: list[Slab]) -> None:
        """Takes other slabs in, while the parameters are whole."""
        assert self._state is State.READY
        self.slabs = [slab for slab in self.slabs if slab not in old] + new
        self._look_at_slabs()

    def check_in_place(self) -> None:
        """In a module about to run, every parameter must be the one that was sharded, in its storage."""
        for slab in self.slabs:
            slab.check_unchanged()
            for entry, face in self._faces(slab):
                if not slab.holds(entry.parameter):
                    raise RuntimeError(
                        f"parameter '{entry.name}' was moved, cast or given other data (.to, .half, .cuda, p.data = …) "
                        "after the model was sharded, so the ranks no longer share it: do so before zerofold sees the "
                        "model, or after zf.close(model). If the model's own forward casts it, as routers do, keep it "
                        "in that dtype: zf.Precision(..., keep=[name])"
                    )
                # A functional call that began while the unit was released has put back what it found then.
                _put(entry, entry.parameter, instead_of=face)
                for module, attribute in entry.sites:
                    held = module._parameters.get(attribute)
                    if isinstance(held, ShardedParameter) and held is not entry.parameter:
                        raise RuntimeError(_displaced(entry.name, "replaced"))

    def check_places(self) -> None:
        """After a step's work, when functional calls are over: the module must hold what is being trained."""
        for slab in self.slabs:
            for entry, face in self._faces(slab):
                for module, attribute in entry.sites:
                    held = module._parameters.get(attribute)
                    if held is not entry.parameter and held is not face:
                        raise RuntimeError(_displaced(entry.name, "removed" if held is None else "replaced"))

    def _faces(self, slab: Slab) -> Iterator[tuple[Entry, Tensor]]:
        return zip(slab.entries, slab.faces, strict=True)

    def _guard(self, arrive: Callable[[], None] | None) -> None:
        for slab in self.slabs:
            for entry in slab.entries:
                guard(entry.parameter, arrive or self._refusal(entry.name))

    def _touched(self) -> None:
        self.fetch(self)

    def _refusal(self, name: str) -> Callable[[], None]:
        is_cut, unit = self.is_cut, self.name  # and not the unit itself, which keeps these

        def refuse() -> None:
            if not is_cut:
                raise RuntimeError(
                    f"parameter '{name}' was changed by one optimizer, and is fetched from its owners after the step "
                    "of the other: read it then, or inside `with zf.full_params(model)`"
                )
            raise RuntimeError(
                f"the data of parameter '{name}' is on other ranks outside the forward and backward of "
                f"'{unit or 'the model'}': read it with zf.full(p) or inside `with zf.full_params(model)`"
            )

        return self._refusals.setdefault(name, refuse)


def _put(entry: Entry, tensor: Tensor, *, instead_of: Tensor) -> None:
    """Only where the other face is: a functional call may have put a tensor of its own there for a while."""
    for module, attribute in entry.sites:
        if module._parameters.get(attribute) is instead_of:
            module._parameters[attribute] = tensor  # type: ignore[assignment]  # a ShardedParameter is one


def _displaced(name: str, what: str) -> str:
    return (
        f"parameter '{name}' was {what} after the model was sharded, so what is trained is not what the model uses: "
        "change values in place inside `with zf.full_params(model)`, or call zf.close(model), replace it, and prepare "
        "the model again with a new optimizer"
    )
