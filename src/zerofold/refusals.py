"""What is said where something is asked of a cut tensor that only a whole one can give."""

from __future__ import annotations

from typing import Any

from zerofold.part import Part
from zerofold.shard_spec import ShardSpec

COPYING = (
    "a sharded model, or a tensor of it, cannot be deep-copied: copy the model before zerofold sees it, or build a "
    "second one and fill it inside `with zf.full_params(model): second.load_state_dict(model.state_dict())`"
)
PICKLING = (
    "a sharded model, or a tensor of it, cannot be pickled: inside `with zf.full_params(model)` save "
    "model.state_dict(), or call zf.close(model) first; zf.full(tensor) gives one whole tensor"
)
WRITING = (
    "is cut over ranks and is no memory to write to a file from: zf.export(model, folder) writes what from_pretrained "
    "reads; or call save_pretrained or save_file inside `with zf.full_params(model)`"
)

_NORMS = frozenset({"norm", "linalg_vector_norm", "frobenius_norm", "_foreach_norm"})


def needs_whole(func: Any, spec: ShardSpec) -> str:
    name = func._schema.name.split("::")[1]
    where = f"this rank holds elements {spec.own} of '{spec.name}' {tuple(spec.shape)}"
    if name in _NORMS:
        return f"{name} needs the whole tensor, but {where}: clip with zf.clip_grad_norm_(model, norm), or use zf.full"
    if spec.loose is not None:
        return (
            f"{name} needs the whole tensor, but {where}: it was cut when its module was built. Change it inside `with "
            "zero.GatheredParameters(p, modifier_rank=0)`, read it with zf.full(p), and run a forward after the model "
            "is prepared"
        )
    return (
        f"{name} needs the whole tensor, but {where}: read it with zf.full(p) or inside `with zf.full_params(model)`. "
        f"In a forward it is whole only while its unit '{spec.unit or 'root'}' is being called; if the weight is used "
        "without calling that module, choose units that contain the caller"
    )


def state_dict_of_parts(name: str, part: Part) -> str:
    return (
        f"state_dict(): this rank has a part of '{name}', {tuple(part.local_shape)} of {tuple(part.shape)}, and so "
        "have the other ranks of its tensor axis: after zf.prepare, zf.save and zf.export write whole parameters, and "
        "zf.full_tensors gives them one by one"
    )


def moved(spec: ShardSpec) -> str:
    if spec.loose is not None:
        return (
            f"'{spec.name}' was cut when its module was built and cannot be moved or cast (.to, .half, "
            ".cuda, …): build it in the dtype it is to have, or pass dtype= to zero.Init"
        )
    return (
        f"'{spec.name}' is cut over ranks and cannot be moved or cast any more (.to, .half, .cuda, …): do "
        "so before zerofold sees the model, or after zf.close(model). A copy in another dtype: p.detach().to(dtype)"
    )


def used_up(spec: ShardSpec) -> str:
    return (
        f"the gradient of '{spec.name}' was in host memory that the step has used for the new parameter: read "
        "it before optimizer.step(), and clear it with zero_grad() after"
    )


def unreduced(spec: ShardSpec) -> str:
    return (
        f"the gradient of '{spec.name}' is still a local sum on every rank (no_sync, or accumulate): run the "
        "last backward outside no_sync, or let the attached optimizer's step() reduce it, before it is read"
    )
