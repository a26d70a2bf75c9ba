"""`zf.tensor_parallel`: the inside of every layer shared by the ranks of the tensor axis, by torch's ParallelStyles."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.hooks import RemovableHandle

from zerofold.agree import agree
from zerofold.groups import make_control
from zerofold.nested import tensors_in
from zerofold.parallel.known import Wish, plan_for
from zerofold.parallel.local import View, Views, keep, part_of_placement
from zerofold.parallel.mesh import TENSOR, Mesh
from zerofold.part import Part, part_of, set_part

Model = TypeVar("Model", bound=nn.Module)

_ATTRIBUTE = "_zerofold_tensor_ranks"


def tensor_parallel(
    model: Model,
    mesh: Mesh,
    plan: Mapping[str, ParallelStyle] | None = None,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> Model:
    """Leaves each rank of the mesh's tensor axis its part of every layer, in place; `zf.prepare(mesh=…)` does it by
    itself, with the plan for known layers, if it has not been done.

    plan               {module name: torch ParallelStyle}, as torch's parallelize_module takes it. By default layers
                       like those of GPT, GPT-2, Llama, T5 and Mixtral are known, and linear layers in a Sequential;
                       what is not known stays whole
    sequence_parallel  norms and dropouts between the layers work on a part of the sequence, which must divide by the
                       ranks; for blocks like those of GPT and Llama
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
    if mesh.tensor == 1:
        return model
    control = make_control(None, overlap=False)
    try:
        axis = mesh.along(TENSOR)
        wish = Wish(mesh.tensor, sequence_parallel, loss_parallel)
        chosen = agree(control, lambda: _check(model, plan, wish) or _chosen(model, plan, wish))
        _share_values(model, axis)
        agree(control, lambda: _apply(model, axis, chosen))
    finally:
        dist.destroy_process_group(control.group)
    setattr(model, _ATTRIBUTE, mesh.tensor)
    _share_random_state(axis)
    _FirstForward(model, axis)
    return model


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether `tensor_parallel` or `take_in` was here."""
    return any(hasattr(module, _ATTRIBUTE) for module in model.modules())


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
        held = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
        for name, parameter in held.items():
            if id(parameter) not in made:
                piece = parameter.to_local().detach().clone()
                local = nn.Parameter(piece, requires_grad=parameter.requires_grad)
                set_part(local, part_of_placement(parameter.shape, parameter.placements[0], axis))
                made[id(parameter)] = local
            module._parameters[name] = made[id(parameter)]
        _show(module, held, axis)
    _mark_whole(model, axis)
    setattr(model, _ATTRIBUTE, mesh.tensor)
    _FirstForward(model, axis)
    return made


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
    if is_tensor_parallel(model):
        raise ValueError("this model is spread over a tensor axis already: build it again to spread it another way")
    if has_dtensors(model):
        raise ValueError(
            "this model has DTensor parameters already: give it to zf.prepare(mesh=...) as it is, or build it without"
        )
    if plan is not None and (wish.sequence_parallel or wish.loss_parallel):
        raise ValueError(
            "plan= says all that is done: leave sequence_parallel and loss_parallel out, or put the styles into it"
        )
    if plan is not None and not (isinstance(plan, Mapping) and all(isinstance(s, ParallelStyle) for s in plan.values())):
        raise TypeError(
            "plan must be a dict {module name: torch ParallelStyle}, for example {'blocks.*.up': ColwiseParallel()}"
        )


def _chosen(model: nn.Module, plan: Mapping[str, ParallelStyle] | None, wish: Wish) -> Mapping[str, ParallelStyle]:
    return plan_for(model, wish) if plan is None else plan


def _share_values(model: nn.Module, axis: DeviceMesh) -> None:
    """Those of the first rank: afterwards each can take its part without asking."""
    first = dist.get_global_rank(axis.get_group(), 0)
    seen: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta" and id(tensor) not in seen:
            seen.add(id(tensor))
            values = tensor.detach().to(axis.device_type).contiguous()
            dist.broadcast(values, first, group=axis.get_group())
            tensor.data.copy_(values)


def _apply(model: nn.Module, axis: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    before = {(module, name): p for module in model.modules() for name, p in module._parameters.items()}
    with warnings.catch_warnings(), _same_random_state(axis):
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
    found = [
        (module, {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)})
        for module in model.modules()
    ]
    for module, made in found:
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
    if known is None or known.dim is None:
        keep(original, shown.to_local().detach().clone(), part)  # a clone: torch's is a view of the whole
    elif known != part:
        raise ValueError(
            f"plan: '{name}' of shape {tuple(part.shape)} belongs to two modules, and would be cut along dimension "
            f"{known.dim} for one and {part.dim} for the other: give both the same cut"
        )


def _show(module: nn.Module, shown: Mapping[str, DTensor], axis: DeviceMesh) -> None:
    views = {name: View(each.placements[0], each.shape) for name, each in shown.items()}
    for name, buffer in module._buffers.items():
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
        ranks = parameter.device_mesh.mesh.flatten().tolist()
        if parameter.device_mesh.ndim != 1 or ranks != axis.mesh.flatten().tolist():
            raise ValueError(
                f"'{name}' is a DTensor over ranks {ranks}, and the tensor axis here is {axis.mesh.flatten().tolist()}: "
                "parallelize the model over mesh.along('tensor')"
            )
        part_of_placement(parameter.shape, parameter.placements[0], axis)


@dataclass(frozen=True)
class _same_random_state:  # noqa: N801: reads as the context manager it is
    """torch sets the device's random state of all ranks to the first one's when it makes its first DTensor."""

    axis: DeviceMesh

    def __enter__(self) -> None:
        kind = self.axis.device_type
        self.__dict__["state"] = None if kind == "cpu" else torch.get_device_module(kind).get_rng_state()

    def __exit__(self, *error: object) -> None:
        if self.__dict__["state"] is not None:
            torch.get_device_module(self.axis.device_type).set_rng_state(self.__dict__["state"])


def _share_random_state(axis: DeviceMesh) -> None:
    """The first rank's, so that what all hold alike is dropped alike."""
    first = dist.get_global_rank(axis.get_group(), 0)
    for module in _generators(axis):
        state = module.get_rng_state()
        sent = state.to(axis.device_type)
        dist.broadcast(sent, first, group=axis.get_group())
        module.set_rng_state(sent.to(state.device))


def _generators(axis: DeviceMesh) -> Iterator[Any]:
    yield torch.random
    if axis.device_type != "cpu":
        yield torch.get_device_module(axis.device_type)


class _FirstForward:
    """Before the first forward: the ranks of the axis look whether they got the same batch and random state.

    A sampler over all ranks gives each its own batch, and the sums over ranks would then be sums of nothing sensible.
    """

    def __init__(self, model: nn.Module, axis: DeviceMesh) -> None:
        self.axis = axis
        self.handle: RemovableHandle = model.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.handle.remove()
        inputs = sum(zlib.crc32(_bytes(tensor)) for tensor in tensors_in((args, kwargs)))
        state = sum(zlib.crc32(_bytes(module.get_rng_state())) for module in _generators(self.axis))
        lowest = torch.tensor([inputs, state], dtype=torch.int64, device=self.axis.device_type)
        highest = lowest.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.axis.get_group())
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.axis.get_group())
        same_inputs, same_state = (lowest == highest).tolist()
        ranks = ", ".join(map(str, self.axis.mesh.flatten().tolist()))
        if not same_inputs:
            raise ValueError(
                f"ranks {ranks} share the inside of every layer and got different inputs: give them the same batch, "
                "chosen by mesh.coordinate['data']"
            )
        if not same_state and model.training and _drops(model):
            raise ValueError(
                f"ranks {ranks} share the inside of every layer and would draw different dropout masks: seed them "
                "alike, by mesh.coordinate['data']"
            )


def _bytes(tensor: Tensor) -> bytes:
    if tensor.device.type == "meta":
        return b""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _drops(model: nn.Module) -> bool:
    """Whether any module has a probability to drop with, under the names that torch and Hugging Face use."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False
