"""When a device runs out of memory: what is in it, and what would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from zerofold.engine import Engine
from zerofold.entry import Entry, dtypes_of
from zerofold.observe.ledger import Ledger
from zerofold.placement import row
from zerofold.plan.states import Widths, state_bytes
from zerofold.sharded import ShardedTensor

_ROWS = (0, 1, 2, 3)
HEADING = "zerofold: out of memory"


@dataclass(frozen=True)
class Needs:
    """The parameters of a model by what they take: elements that are trained by their widths, and bytes of the rest."""

    trained: dict[Widths, int]
    frozen: int

    @classmethod
    def of(cls, entries: Iterable[Entry], states: float) -> Needs:
        """`states`: what the optimizer keeps, in numbers per trained parameter."""
        trained: dict[Widths, int] = {}
        frozen = 0
        for entry in entries:
            size, dtypes = entry.parameter.numel(), dtypes_of(entry)
            if entry.wants_gradient:
                widths = Widths.of_dtypes(dtypes, moments=round(states * dtypes.master.itemsize))
                trained[widths] = trained.get(widths, 0) + size
            else:
                frozen += size * dtypes.compute.itemsize
        return cls(trained, frozen)

    def on_a_rank(self, stage: int, world: int) -> int:
        states = sum(state_bytes(size, stage, world, widths=widths).total for widths, size in self.trained.items())
        return round(states + self.frozen / (world if row(stage).parameters.is_cut else 1))

    def advice(self, world: int) -> str:
        """Before anything is sharded."""
        return (
            f"States with AdamW, per rank of {world}: {self.table(world)}. Build the model on the meta device (with "
            'torch.device("meta")) so that no rank ever holds all of it, or choose a higher stage'
        )

    def table(self, world: int) -> str:
        return ", ".join(f"stage {stage}: {_size(self.on_a_rank(stage, world))}" for stage in _ROWS)


def explain_out_of_memory(engine: Engine) -> str:
    """What this rank holds of one model, what each stage would hold, and what to change first."""
    books = Ledger(engine).snapshot()
    states, temporary = books["state_bytes"], books["temporary_bytes"]
    held = sum(states.values()) + sum(temporary.values())
    world, device = engine.groups.control.size, engine.groups.gather.device
    entries = [entry for slab in engine.slabs() for entry in slab.entries]
    needs = Needs.of(entries, _states_per_parameter(engine))
    lines = [
        f"{HEADING} on {device}, rank {engine.rank} of {engine.world}, stage {engine.row.name}",
        "  states: " + ", ".join(f"{name} {_size(size)}" for name, size in states.items()),
        "  for a while: " + ", ".join(f"{name} {_size(size)}" for name, size in temporary.items()),
    ]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device)
        lines.append(
            f"  everything else of this process (activations, other models): {_size(max(0, used - held))}; torch has "
            f"{_size(torch.cuda.memory_reserved(device))} of {_size(total)}, {_size(free)} are free"
        )
    lines.append(f"  states with a full optimizer, per rank of {world}: {needs.table(world)}")
    lines.append(f"  to try, in this order: {'; '.join(_advice(engine, needs, world, temporary))}")
    return "\n".join(lines)


def _advice(engine: Engine, needs: Needs, world: int, temporary: dict[str, int]) -> list[str]:
    found = []
    now = sum(Ledger(engine).snapshot()["state_bytes"].values())
    others = [stage for stage in _ROWS if str(stage) != engine.row.name]
    smaller = [stage for stage in others if needs.on_a_rank(stage, world) < 0.9 * now]
    if smaller:
        found.append(f"stage={smaller[-1]} ({_size(needs.on_a_rank(smaller[-1], world))} of states)")
    if world == 1:
        found.append("more ranks: stages 1 to 3 divide the states among them")
    if engine.precision.parameters is None:
        found.append('precision="bf16" (half the activations and gathered parameters)')
    found.append("a smaller micro-batch with accumulate=, or activation checkpointing")
    if engine.row.parameters.is_cut and temporary["gathered"] > now / 10:
        found.append(f"live_bytes= below {_size(engine.schedule.live_bytes)}, or smaller units=")
    return found


def _states_per_parameter(engine: Engine) -> float:
    """Of what the optimizers keep: as they have it, or as their settings tell before the first step."""
    kept = trained = 0
    for optimizer in engine.optimizers:
        for parameter, state in optimizer.state.items():
            size = _numel(parameter)
            kept += sum(_numel(v) for v in state.values() if isinstance(v, torch.Tensor) and _numel(v) == size)
            trained += size
    if trained:
        return kept / trained
    defaults = [optimizer.defaults for optimizer in engine.optimizers]
    return max((2.0 if "betas" in each else float(bool(each.get("momentum"))) for each in defaults), default=2.0)


def _numel(tensor: torch.Tensor) -> int:
    return tensor.local.numel() if isinstance(tensor, ShardedTensor) else tensor.numel()


def _size(count: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def add_note(error: BaseException, text: str) -> None:
    """Shown below the traceback; type and message stay torch's, so that whoever catches it still does."""
    if not any(note.startswith(HEADING) for note in getattr(error, "__notes__", [])):
        error.add_note(text)


@contextmanager
def explain_oom(model: nn.Module) -> Iterator[None]:
    """Inside, an out-of-memory error of torch says what this rank holds of the model and what would fit.

    The forward of a sharded model does so by itself. Nothing can be added to an error inside `loss.backward()` or
    torch's own `optimizer.step()` from outside: put the step into this. The error stays torch's, with a note added.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64), stage=3)
    >>> try:
    ...     with zf.explain_oom(model):
    ...         raise torch.OutOfMemoryError("CUDA out of memory")
    ... except torch.OutOfMemoryError as error:
    ...     print(error.__notes__[0].splitlines()[0])
    zerofold: out of memory on cpu, rank 0 of 1, stage 3
    >>> zf.close(model)
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        add_note(error, explain_out_of_memory(Engine.of(model)))
        raise
