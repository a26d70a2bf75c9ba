"""`zf.tensor_parallel`: the inside of every layer shared by the ranks of the tensor axis, by torch's ParallelStyles."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from zerofold.agree import agree
from zerofold.comm import Comm
from zerofold.engine import Engine
from zerofold.groups import make_control, make_model_group
from zerofold.parallel.alike import SameInputs, own_random_state, share_random_state
from zerofold.parallel.known import Wish, plan_for
from zerofold.parallel.local import View, Views, is_in_a_graph, keep, part_of_placement
from zerofold.parallel.marks import TensorSpread, was_spread
from zerofold.parallel.mesh import TENSOR, Mesh
from zerofold.parallel.same_cut import check_same_cut
from zerofold.part import Part, part_of, set_part
from zerofold.refusals import state_dict_of_parts

Model = TypeVar("Model", bound=nn.Module)


def tensor_parallel(
    model: Model,
    mesh: Mesh,
    plan: Mapping[str, ParallelStyle] | None = None,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> Model:
    """Leaves each rank of the mesh's tensor axis its part of every layer, in place. `zf.pipeline` and
    `zf.prepare(mesh=…)` do it by themselves, with the plan for known layers, if it has not been done.

    plan               {module name: torch ParallelStyle}, as torch's parallelize_module takes it. By default layers
                       like those of GPT, GPT-2, Llama, T5 and Mixtral are known, and linear layers in a Sequential;
                       what is not known stays whole
    sequence_parallel  norms and dropouts between the layers work on a part of the sequence, which must divide by the
                       ranks; for blocks like those of GPT, GPT-2, Llama, T5 and Mixtral
    loss_parallel      logits stay cut over the vocabulary, and F.cross_entropy of them is computed by parts

    Parameters stay the same objects, with a part of their values, so an optimizer that was built before stays valid.
    Every rank starts from the values of the first rank of its tensor axis, and from its random state: ranks of one
    tensor axis hold the same activations, so they must get the same batch and draw the same dropout masks. The first
    forward compares both.

    >>> import torch, zerofold as zf
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    >>> zf.tensor_parallel(mlp, zf.mesh(tensor=1)) is mlp  # cut in two with tensor=2
    True
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a zf.mesh(...), not {type(mesh).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if plan is not None and not isinstance(plan, Mapping):
        raise TypeError(
            f"plan={plan!r} must be a dict of module names and torch ParallelStyles, or None for known layers"
        )
    if mesh.tensor == 1:
        return model
    control = make_control(None, overlap=False)
    try:
        axis = mesh.along(TENSOR)
        wish = Wish(mesh.tensor, sequence_parallel, loss_parallel)
        chosen = agree(control, lambda: _chosen(model, plan, wish))
        check_same_cut(control, model, mesh, chosen, wish)
        _share_values(model, axis)
        agree(control, lambda: _apply(model, axis, chosen))
    finally:
        dist.destroy_process_group(control.group)
    sequence, words = (mesh.tensor if wished else 1 for wished in (sequence_parallel, loss_parallel))
    TensorSpread(mesh.tensor, sequence, words).leave_on(model)
    model.register_state_dict_pre_hook(_refuse_parts)
    share_random_state(axis)
    _compare_inputs(model, mesh, control)
    return model


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether `tensor_parallel` or `take_in` was here, or somebody who has cut parameters by hand."""
    parts = (part_of(parameter) for parameter in model.parameters())
    return was_spread(model) or any(part is not None and part.dim is not None for part in parts)


def take_in(model: nn.Module, mesh: Mesh) -> dict[int, nn.Parameter]:
    """For a model whose parameters are DTensors over the tensor axis already: local ones in their place.

    By the id of each DTensor, what stands for it now: an optimizer that holds one has to be told (`rebase`).
    """
    axis = mesh.along(TENSOR)
    control = make_control(None, overlap=False)
    try:
        agree(control, lambda: _check_dtensors(model, axis))
    finally:
        dist.destroy_process_group(control.group)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        held = _dtensors(module)
        for name, parameter in held.items():
            if id(parameter) not in made:
                piece = parameter.to_local().detach().clone()
                local = nn.Parameter(piece, requires_grad=parameter.requires_grad)
                part = part_of_placement(parameter.shape, parameter.placements[0], axis)
                set_part(local, part, axis.get_group())
                made[id(parameter)] = local
            module._parameters[name] = made[id(parameter)]
        _show(module, held, axis)
    _mark_whole(model, axis)
    _share_values(model, axis)  # torch has cut some layers, and left others to each rank's own seed
    TensorSpread(mesh.tensor).leave_on(model)
    model.register_state_dict_pre_hook(_refuse_parts)
    _compare_inputs(model, mesh, control)
    return made


def spread_over_tensor_ranks(model: nn.Module, mesh: Mesh) -> dict[int, nn.Parameter]:
    """Unless that was done before. What stands for DTensors now, by their ids."""
    if mesh.tensor == 1 or is_tensor_parallel(model):
        return {}
    if has_dtensors(model):
        return take_in(model, mesh)
    tensor_parallel(model, mesh)
    return {}


def has_dtensors(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def rebase(optimizer: torch.optim.Optimizer, made: Mapping[int, nn.Parameter]) -> None:
    """The optimizer's parameters and what it knows of them, as this rank holds them now."""
    for group in optimizer.param_groups:
        group["params"] = [made.get(id(parameter), parameter) for parameter in group["params"]]
    for old, state in list(optimizer.state.items()):
        new = made.get(id(old), old)
        part = part_of(new)
        for name, value in state.items():
            if isinstance(value, DTensor):
                state[name] = value.to_local()
            elif isinstance(value, Tensor) and part is not None and value.shape == part.shape != new.shape:
                state[name] = part.of(value)
        if new is not old:
            optimizer.state[new] = optimizer.state.pop(old)


def _check(model: nn.Module, plan: Mapping[str, ParallelStyle] | None, wish: Wish) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if Engine.is_on(model):
        raise ValueError("this model is already sharded: call zf.tensor_parallel before zf.prepare or zf.shard")
    if is_tensor_parallel(model):
        raise ValueError(
            "this model is spread over a tensor axis already (zf.pipeline and zf.prepare do it where nobody has): call "
            "zf.tensor_parallel before them, and once"
        )
    if has_dtensors(model):
        raise ValueError(
            "this model has DTensor parameters already: give it to zf.prepare(mesh=...) as it is, or build it without"
        )
    held = next((name for name, parameter in model.named_parameters() if is_in_a_graph(parameter)), None)
    if held is not None:
        raise ValueError(
            f"'{held}' is in the graph of an earlier forward, which somebody holds, for example by its loss: let go of "
            "it (del loss) before the model is spread over a tensor axis"
        )
    if plan is not None and (wish.sequence_parallel or wish.loss_parallel):
        raise ValueError(
            "plan= says all that is done: leave sequence_parallel and loss_parallel out, or put the styles into it"
        )
    if plan is not None and not (
        isinstance(plan, Mapping) and all(isinstance(s, ParallelStyle) for s in plan.values())
    ):
        raise TypeError(
            "plan must be a dict {module name: torch ParallelStyle}, for example {'blocks.*.up': ColwiseParallel()}"
        )


def _chosen(model: nn.Module, plan: Mapping[str, ParallelStyle] | None, wish: Wish) -> Mapping[str, ParallelStyle]:
    _check(model, plan, wish)
    return plan_for(model, wish) if plan is None else plan


def _refuse_parts(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Before `zf.prepare` and after `zf.close` too: a part under the name of the whole would be taken for it."""
    for name, parameter in model.named_parameters():
        part = part_of(parameter)
        if part is not None and part.is_cut:
            raise RuntimeError(state_dict_of_parts(name, part))


def _compare_inputs(model: nn.Module, mesh: Mesh, control: Comm) -> None:
    comm = make_model_group(mesh.groups(TENSOR), control)
    assert comm is not None, "there are several tensor ranks"
    SameInputs(model, mesh.along(TENSOR), comm)


def _share_values(model: nn.Module, axis: DeviceMesh) -> None:
    """Those of the first rank, of all that is not cut: afterwards each can take its part without asking."""
    first = dist.get_global_rank(axis.get_group(), 0)
    for tensor in (*model.parameters(), *model.buffers()):
        part = part_of(tensor)
        if tensor.device.type != "meta" and (part is None or not part.is_cut):
            values = tensor.detach().to(axis.device_type).contiguous()
            dist.broadcast(values, first, group=axis.get_group())
            tensor.data.copy_(values)


def _apply(model: nn.Module, axis: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    before = {(module, name): p for module in model.modules() for name, p in module._parameters.items()}
    with warnings.catch_warnings(), own_random_state(axis):
        # torch warns of a name that fits no module and goes on with the others: a layer would silently stay whole.
        warnings.filterwarnings("error", message="Parallelize plan key")
        try:
            # None: every rank has the values, so nobody need send them.
            parallelize_module(model, axis, dict(plan), src_data_rank=None)
        except UserWarning as warning:
            (key,) = [key for key in plan if f"'{key}'" in str(warning)][:1] or [str(warning)]
            raise ValueError(f"plan: '{key}' is the name of no module of this {type(model).__name__}") from None
        except NotImplementedError as error:
            raise ValueError(f"plan: {error}") from error
    for module in model.modules():
        made = _dtensors(module)
        for name, shown in made.items():
            original = before[module, name]
            assert original is not None
            _put_back(original, shown, axis, name)
            module._parameters[name] = original
        _show(module, made, axis)
    _mark_whole(model, axis)
    if plan and not any(part is not None and part.dim is not None for part in map(part_of, model.parameters())):
        raise ValueError("plan: no parameter is cut by it; give ColwiseParallel or RowwiseParallel for some layers")


def _put_back(original: nn.Parameter, shown: DTensor, axis: DeviceMesh, name: str) -> None:
    """The parameter that was there, with this rank's values."""
    part, known = part_of_placement(shown.shape, shown.placements[0], axis), part_of(original)
    if known is not None:  # another stage of a pipeline may count it
        part = replace(part, counts=part.counts and known.counts, name=known.name)
    if known is None or known.dim is None:
        # A clone: torch's is a view of the whole. It may be on the mesh's device, and the others are where they were.
        keep(original, shown.to_local().detach().clone().to(original.device), part, axis)
    elif known != part:
        raise ValueError(
            f"plan: '{name}' of shape {tuple(part.shape)} belongs to two modules, and would be cut along dimension "
            f"{known.dim} for one and {part.dim} for the other: give both the same cut"
        )


def _dtensors(module: nn.Module) -> dict[str, DTensor]:
    return {name: p for name, p in dict[str, object](module._parameters).items() if isinstance(p, DTensor)}


def _show(module: nn.Module, shown: Mapping[str, DTensor], axis: DeviceMesh) -> None:
    views = {name: View(each.placements[0], each.shape) for name, each in shown.items()}
    for name, buffer in list(module._buffers.items()):
        if isinstance(buffer, DTensor):
            views[name] = View(buffer.placements[0], buffer.shape)
            module._buffers[name] = buffer.to_local()
    if views:
        Views(axis, views).install(module)


def _mark_whole(model: nn.Module, axis: DeviceMesh) -> None:
    """What is not cut is held alike by all ranks of the axis, and counts on the first."""
    is_first = axis.get_local_rank() == 0
    for parameter in model.parameters():
        part = part_of(parameter)
        if part is None:
            shape = parameter.shape
            set_part(parameter, Part(shape, None, 0, shape[0] if shape else 0, counts=is_first))
        elif part.dim is None:
            set_part(parameter, replace(part, counts=part.counts and is_first))


def _check_dtensors(model: nn.Module, axis: DeviceMesh) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        ranks, here = parameter.device_mesh.mesh.flatten().tolist(), axis.mesh.flatten().tolist()
        if parameter.device_mesh.ndim != 1 or ranks != here:
            raise ValueError(
                f"'{name}' is a DTensor over ranks {ranks}, and the tensor axis here is {here}: parallelize the model "
                "over mesh.along('tensor')"
            )
        part_of_placement(parameter.shape, parameter.placements[0], axis)
