"""fully_shard: FSDP2's shape. Blocks are marked, then the model; the outermost is sharded at its first use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from zerofold.compat.fsdp_optimizers import follow_optimizers
from zerofold.compat.fsdp_options import HELD, check_nothing_is_ignored, move, offload_of, precision_of_policy
from zerofold.compat.fsdp_policies import NEVER_CALLED
from zerofold.compat.fsdp_wishes import cast_inputs, give_face, kept_in_fp32, refuse_call_from_outside, shown, take_face
from zerofold.engine import Engine
from zerofold.prepare import shard
from zerofold.unit import Unit

_AS_IT_IS, _NO_OFFLOAD = MixedPrecisionPolicy(), OffloadPolicy()
Modules = TypeVar("Modules", nn.Module, list[nn.Module])


@dataclass(eq=False)
class _Wish:
    """What `fully_shard` was told about one module, and what has become of it."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | None
    policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    around: ref[nn.Module] | None = None  # the outermost module that was marked around it
    root: ref[nn.Module] | None = None  # the same, once it is sharded or being sharded
    bound: int = 0  # of the outermost: gathered bytes where parameters are released after forward


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = _AS_IT_IS,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
) -> Modules:
    """Marks a module as one that is gathered as a whole, in FSDP2's shape: call it on blocks, then on the model.

    The same module comes back, with the methods of `FSDPModule`. The outermost is sharded at its first use: when its
    parameters, its state dict or its forward are asked for. The optimizer is built from `model.parameters()`, or in
    groups from those of its modules. `torch.nn.utils.clip_grad_norm_` works on them, and
    `zf.clip_grad_norm_(model, norm)` does the same in one communication. The arguments are torch's. What differs:

    module                 of a list, each module is gathered by itself
    mesh                   of one dimension, or of two (groups × ranks in a group) for copies across groups; the whole
                           model has one
    reshard_after_forward  False for all blocks keeps parameters gathered until backward. A number is refused
    mp_policy              the model's counts for all; a block may stay in fp32. Weights are fp32 masters
    offload_policy         CPUOffloadPolicy: parameters, gradients and optimizer states of the whole model are in host
                           memory
    shard_placement_fn, ignored_params
                           refused: parameters are cut in flat ranges, all of them

    A model on the meta device is filled, unit by unit, in its modules' own way (`reset_parameters`, `_init_weights`)
    at its first use. After `model.to_empty(device=...)` it has memory for all of its parameters until then.

    >>> import torch
    >>> from zerofold.fsdp import fully_shard
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    >>> for layer in model:
    ...     _ = fully_shard(layer)
    >>> model = fully_shard(model)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> model(torch.ones(2, 8)).sum().backward(); optimizer.step()
    >>> model[0].weight
    ShardedParameter('0.weight', shape=(8, 8), dtype=torch.float32, this rank holds elements 0:64)
    """
    if shard_placement_fn is not None:
        raise ValueError("shard_placement_fn: parameters are cut in flat ranges, so there is no dimension to choose")
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward}: True releases parameters after forward, False keeps them; "
            "for gathers inside a machine use zf.prepare(..., stage='hpz')"
        )
    check_nothing_is_ignored(ignored_params=ignored_params)
    modules: list[nn.Module] = [module] if isinstance(module, nn.Module) else list(module)
    for each in modules:
        _check(each)
        move(each, _device_of(mesh))
        give_face(each, FSDPModule)
        # Beside nn.Module's own attributes, so that nothing of it shows.
        object.__setattr__(each, "_fsdp_wish", _Wish(mesh, reshard_after_forward, mp_policy, offload_policy))
        for inner in each.modules():
            if isinstance(inner, FSDPModule) and inner is not each:
                inner._fsdp_wish.around = ref(each)
    return module


def _check(module: nn.Module) -> None:
    name = type(module).__name__
    if isinstance(module, FSDPModule):
        raise ValueError(f"fully_shard was called on this {name} already: call it once for each module")
    if isinstance(module, NEVER_CALLED):
        raise ValueError(f"fully_shard: a {name} is never called, so nothing would gather it: call it on what is in it")
    if Engine.is_on(module):
        raise ValueError(
            f"a module of this {name} was used before: call fully_shard on all blocks and then on the model, before "
            "the parameters, the state dict or the forward of any of them"
        )


def _device_of(mesh: DeviceMesh | None) -> torch.device | None:
    return None if mesh is None else torch.device(mesh.device_type)


class FSDPModule:
    """The methods that `fully_shard` adds to a module."""

    _fsdp_wish: _Wish

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._fsdp_wish.root is None:
            refuse_call_from_outside(_outermost(self), "fully_shard")
            _shard(_outermost(self))
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters as an optimizer must hold them; whole ones inside `zf.full_params`."""
        engine = _engine(self, during_sharding=True)
        found = super().named_parameters(*args, **kwargs)  # type: ignore[misc]
        yield from found if engine is None else shown(found, engine)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Sharded tensors, which torch.distributed.checkpoint saves and loads; `full_tensor()` gives a whole one."""
        if kwargs.get("destination") is None:  # else a module around it is asked, and asks all in it
            _engine(self)
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Takes whole tensors or sharded ones; each rank keeps its part."""
        _engine(self)
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> Unsharded | None:
        """Gathers this module's own parameters, until `reshard` or the end of the next backward."""
        engine, unit = _unit(self)
        engine.schedule.lend(unit)
        return Unsharded() if async_op else None

    def reshard(self) -> None:
        engine, unit = _unit(self)
        engine.schedule.take_back(unit)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward adds up gradients on this rank without communication, until it is True again."""
        _root_engine(self, "set_requires_gradient_sync").reductions.suspended = not requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: with a mesh of two dimensions, backward reduces inside groups only, until it is True again."""
        _root_engine(self, "set_requires_all_reduce").reductions.ends_step = None if requires_all_reduce else False

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        engine = _root_engine(self, "set_reshard_after_forward")
        engine.schedule.live_bytes = self._fsdp_wish.bound if reshard_after_forward else HELD

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        if not reshard_after_backward:
            warnings.warn(
                "set_reshard_after_backward(False): parameters are released when backward ends, and gathered again "
                "for the next forward",
                stacklevel=2,
            )

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing to set: every backward ends with its reductions."""

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Nothing to set: the order is learned from the first forward."""

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Nothing to set: the order is learned from the first forward."""


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets a method other than forward use the module's own parameters: they are gathered before it runs.

    A method that only calls modules inside needs no registering: those gather by themselves. Inputs are not cast.

    >>> import torch
    >>> from zerofold.fsdp import fully_shard, register_fsdp_forward_method
    >>> class Scale(torch.nn.Linear):
    ...     def scaled(self, x):
    ...         return x * self.weight
    >>> model = fully_shard(Scale(4, 1))
    >>> register_fsdp_forward_method(model, "scaled")
    >>> tuple(model.scaled(torch.ones(2, 4)).shape)
    (2, 4)
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"register_fsdp_forward_method: this {type(module).__name__} has no method {method_name!r}")
    if not isinstance(module, FSDPModule):
        return  # as in torch: a model that is not sharded runs the same code

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, FSDPModule):
            return method(*args, **kwargs)  # the model was closed
        engine, unit = _unit(module)
        engine.take_in_changes()
        engine.schedule.lend(unit)
        try:
            return method(*args, **kwargs)
        finally:
            if not torch.is_grad_enabled():  # else backward uses them, and its end releases them
                engine.schedule.take_back(unit)

    setattr(module, method_name, run)


class Unsharded:
    """What `unshard(async_op=True)` returns: the parameters are there already."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def _module(face: FSDPModule) -> nn.Module:
    assert isinstance(face, nn.Module)
    return face


def _outermost(face: FSDPModule) -> nn.Module:
    around = None if face._fsdp_wish.around is None else face._fsdp_wish.around()
    return _module(face) if around is None else around


def _engine(face: FSDPModule, *, during_sharding: bool = False) -> Engine | None:
    """Of the model that this module is part of; none while it is being sharded."""
    if face._fsdp_wish.root is None:
        _shard(_outermost(face))
    assert face._fsdp_wish.root is not None
    root = face._fsdp_wish.root()
    assert root is not None
    found = getattr(root, "_zerofold_engine", None)
    return found if during_sharding or found is not None else Engine.of(root)


def _unit(face: FSDPModule) -> tuple[Engine, Unit]:
    engine = _engine(face)
    assert engine is not None
    return engine, next(unit for unit in engine.units if unit.module is _module(face))


def _root_engine(face: FSDPModule, method: str) -> Engine:
    engine = _engine(face)
    assert engine is not None
    if engine.model is not _module(face):
        raise ValueError(f"{method}: call it on the model, not on a {type(face).__name__} inside it: it counts for all")
    return engine


def _shard(model: nn.Module) -> None:
    marked = [each for each in model.modules() if isinstance(each, FSDPModule)]
    units: set[nn.Module] = {_module(each) for each in marked if each is not model}
    own = next(each._fsdp_wish for each in marked if each is model)
    kept = _kept_in_fp32(own, marked)
    for each in marked:
        if each._fsdp_wish.mesh not in (None, own.mesh):
            raise ValueError(f"fully_shard: a {type(each).__name__} has another mesh than the model around it")
    held = {each._fsdp_wish.reshard_after_forward is False for each in marked if each is not model}
    if held == {True, False}:
        warnings.warn(
            "fully_shard: reshard_after_forward=False is given for some blocks only: all are released after forward",
            stacklevel=4,
        )
    stage = 3 if own.mesh is None or own.mesh.ndim == 1 else "hsdp"
    try:
        for each in marked:
            each._fsdp_wish.root = ref(model)
        shard(
            model,
            stage=stage,
            units=lambda name, module: module in units,
            precision=precision_of_policy(own.policy, kept_in_fp32(kept)),
            mesh=own.mesh,
            device=_device_of(own.mesh),
            offload=offload_of((each._fsdp_wish.offload for each in marked), stage),
        )
    except Exception:
        for each in marked:
            each._fsdp_wish.root = None
        raise
    engine = Engine.of(model)
    follow_optimizers(engine)
    engine.on_close += [partial(take_face, _module(each), "_fsdp_wish") for each in marked]
    engine.step.joins_norms = True  # torch.nn.utils.clip_grad_norm_(model.parameters(), …) is how FSDP2 clips
    schedule = engine.schedule
    own.bound = schedule.live_bytes
    schedule.live_bytes = HELD if held == {True} else own.bound
    if own.policy.param_dtype is not None:
        casting = {_module(each) for each in marked if each._fsdp_wish.policy.cast_forward_inputs}
        cast_inputs((casting & units) - kept, own.policy.param_dtype, engine)


def _kept_in_fp32(own: _Wish, marked: Sequence[FSDPModule]) -> set[nn.Module]:
    if own.policy.param_dtype is not None and not own.policy.cast_forward_inputs:
        raise ValueError(
            "MixedPrecisionPolicy(cast_forward_inputs=False): the inputs of the model are always cast to param_dtype; "
            "leave it out"
        )
    kept = set()
    for each in marked:
        dtype = each._fsdp_wish.policy.param_dtype
        if dtype == own.policy.param_dtype:
            continue
        if dtype not in (None, torch.float32):
            raise ValueError(
                f"fully_shard: a {type(each).__name__} has param_dtype={dtype}, and the model around it "
                f"{own.policy.param_dtype}: give the model the policy of its blocks; a block may stay in fp32"
            )
        kept.add(_module(each))
    return kept if own.policy.param_dtype in (torch.bfloat16, torch.float16) else set()
