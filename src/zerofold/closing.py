"""The end of sharding: what is left behind is an ordinary model."""

from __future__ import annotations

import torch
from torch import nn

from zerofold.engine import ATTRIBUTE, Engine
from zerofold.groups import destroy
from zerofold.guard import guard
from zerofold.part import group_of, set_part
from zerofold.slab import Slab


def end(engine: Engine, *, gather: bool = True) -> None:
    """Leaves an ordinary model behind: with whole parameters, or with the cut ones on the meta device."""
    if engine.parked is not None:
        engine.parked.restore()
    engine.is_closed = True
    engine.reducer.finish()
    failure = _end_updates(engine)
    gather = gather or not any(slab.has_own_shard for slab in engine.slabs())  # a rank alone has all of it
    if gather and failure is None:
        engine.hold_all(masters=True)
    elif failure is None:
        engine.schedule.wait_all()
        # Whole parameters stay, so they are to be what the last step makes of them: where states are offloaded,
        # nobody has begun to gather them.
        for unit in engine.units:
            if not unit.is_cut and unit.is_stale:
                engine.schedule.make_current(unit)
    wants_values, gather = gather, gather and failure is None
    engine.hooks.end()
    # After a failure, what is kept is half of one step and half of another.
    goes = engine.row.parameters.is_cut or failure is not None
    away = [] if gather else [slab for slab in engine.slabs() if slab.has_own_shard and (goes or not slab.is_kept)]
    for slab in away:
        _leave_shapes(slab)
    for undo in engine.on_close:
        undo()
    if engine.checkpoints is not None:
        engine.checkpoints.count_in(None)
    engine.boundary.remove()
    for slab in engine.slabs():
        for parameter in slab.parameters:
            parameter.grad = None
            for name in ("_master", "_arrive", "_engine"):  # which would keep all of this alive
                vars(parameter).pop(name, None)
            if slab in away:  # not in the module any more, but somebody may hold it
                guard(parameter, _refuse_gone)
            else:
                vars(parameter).pop("_plain_class", None)
            if not slab.dtypes.is_plain and slab not in away:
                parameter.grad_dtype = parameter.dtype
    if engine.precision.is_mixed and gather:
        # Frozen ones have no master, and yet one dtype for all makes an ordinary model.
        for parameter in engine.model.parameters():
            if parameter.dtype is engine.precision.parameters:
                parameter.data = parameter.data.to(engine.precision.master)
    if engine.matmul_before is not None:
        torch.set_float32_matmul_precision(engine.matmul_before)
    delattr(engine.model, ATTRIBUTE)
    engine.cache.clear()
    engine.pool.clear()
    engine.staging = None
    engine.step.finish = None
    engine.offloading.memory.close()
    if engine.saving_group is not None:
        destroy(engine.groups.mesh, [engine.saving_group], engine.groups.blocks)
    engine.end_groups()
    # They lead back here: all of this would wait for the garbage collector, with the model's memory.
    engine.averages, engine.after_step = [], []
    engine.after_changes, engine.groups_taken_in = [], []
    for slab in engine.slabs():
        slab.update = None
    if wants_values and failure is not None:
        raise failure


def _end_updates(engine: Engine) -> Exception | None:
    """What went wrong in them, after which there are no values to leave behind; all else can be let go of."""
    updates, failure = engine.updates, None
    if updates is not None:
        try:
            updates.close()
        except Exception as error:
            failure = error
        engine.updates = None  # with their memory on the device: somebody may hold the engine, an average for instance
    return failure


def _refuse_gone() -> None:
    raise RuntimeError(
        "the data of this parameter went with its model, which was closed without gathering it or after a failure: "
        "read it before zf.close(model), or load a checkpoint into a new model"
    )


def _leave_shapes(slab: Slab) -> None:
    """In the module; the parameters themselves have no memory here, and may be held by somebody."""
    for entry in slab.entries:
        shown = entry.parameter
        left = nn.Parameter(torch.empty(shown.shape, dtype=shown.dtype, device="meta"), shown.requires_grad)
        if entry.part is not None:
            set_part(left, entry.part, group_of(shown))
        for module, attribute in entry.sites:
            module._parameters[attribute] = left
