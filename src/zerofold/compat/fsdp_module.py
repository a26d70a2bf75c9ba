"""FullyShardedDataParallel: FSDP1's wrapper around a model that zerofold shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, StateDictType

from zerofold.access import clip_grad_norm_, full_params, no_sync
from zerofold.compat.fsdp_calls import FSDPCalls, FSDPUnit
from zerofold.compat.fsdp_optimizers import follow_optimizers
from zerofold.compat.fsdp_options import (
    check_nothing_is_ignored,
    mesh_of,
    move,
    offload_of,
    precision_of,
    sharding_of,
)
from zerofold.compat.fsdp_policies import picked
from zerofold.compat.fsdp_states import WRAPPED, clean, settings_of, shown_state
from zerofold.compat.fsdp_wishes import cast_inputs, give_face, kept_in_fp32, refuse_call_from_outside, shown, take_face
from zerofold.engine import Engine
from zerofold.prepare import shard


class _Kind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, FSDPUnit)


class FullyShardedDataParallel(FSDPCalls, nn.Module, metaclass=_Kind):
    """Shards a model over all ranks, in FSDP1's shape. The optimizer is built after it, from `model.parameters()`.

    The arguments are torch's. What differs:

    sharding_strategy    SHARD_GRAD_OP keeps parameters gathered from forward to backward, as in torch, and frees them
                         after. HYBRID_SHARD without a device_mesh has one group for each machine (LOCAL_WORLD_SIZE)
    auto_wrap_policy     what it picks are units, gathered as one each. They stay where they are, with their own names:
                         no wrapper comes between. Without a policy, inner FSDP(block)s are the units, and the model is
                         sharded at its first use, since it may yet become part of an outer one
    mixed_precision      forward and backward in param_dtype, from fp32 masters that the optimizer updates. Outputs
                         stay as the model makes them, but fp16 ones come out as fp32
    device_id            a model on the CPU is moved there; without it, to the current accelerator, unless the process
                         group is gloo alone
    sync_module_states   always: every rank starts from rank 0's weights
    use_orig_params      always: parameters keep their names and shapes
    backward_prefetch, forward_prefetch, limit_all_gathers
                         nothing to set: the order is learned, and gathering ahead is bounded in bytes
    cpu_offload          parameters, gradients and optimizer states of the whole model are in host memory
    ignored_modules, ignored_states
                         refused: all of the module is sharded

    >>> import torch
    >>> from zerofold.fsdp import FullyShardedDataParallel as FSDP
    >>> model = FSDP(torch.nn.Linear(8, 4))
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    >>> model(torch.ones(2, 8)).sum().backward(); optimizer.step()
    >>> {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    {'weight': (4, 8), 'bias': (4,)}
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"FSDP wraps a torch.nn.Module, not a {type(module).__name__}")
        if type(module) is FullyShardedDataParallel or Engine.is_on(module):
            raise ValueError(
                f"this {type(module).__name__}, or a module in it, is sharded already: wrap blocks first and the model "
                "last, before any of them is used"
            )
        check_nothing_is_ignored(ignored_modules=ignored_modules, ignored_states=ignored_states)
        self._fsdp_wrapped_module = module
        self._is_sharding = self._is_sharded = False
        self._fsdp_options: dict[str, Any] = {
            "sharding_strategy": sharding_strategy,
            "mixed_precision": mixed_precision,
            "cpu_offload": cpu_offload,
        }
        self._sharding, self._init = sharding_of(sharding_strategy), param_init_fn
        _unwrap(module)
        for block, options in picked(module, auto_wrap_policy).items():
            _mark(block, {**self._fsdp_options, **options})
        self._units = {each for each in module.modules() if isinstance(each, FSDPUnit) and each is not module}
        for unit in self._units:
            unit._fsdp_root = ref(self)
        self._precision = precision_of(mixed_precision, module)
        self._kept = self._look_at_units()
        self._device = move(module, device_id)
        self._mesh = mesh_of(sharding_strategy, process_group, device_mesh, self._device)
        self._settings = settings_of(StateDictType.FULL_STATE_DICT)
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_after_load)
        if auto_wrap_policy is not None:
            self._shard()

    def _look_at_units(self) -> set[nn.Module]:
        """Units with options of their own: what can be honoured, and the modules that stay in fp32."""
        kept: set[nn.Module] = set()
        for unit in self._units:
            options, own = unit._fsdp_options, self._fsdp_options
            precision = options["mixed_precision"]
            if sharding_of(options["sharding_strategy"]) != self._sharding:
                warnings.warn(
                    f"a {type(unit).__name__} was wrapped with {options['sharding_strategy']}: the strategy of the "
                    "outermost FSDP counts for the whole model",
                    stacklevel=4,
                )
            if precision == own["mixed_precision"]:
                continue
            if getattr(precision, "param_dtype", None) not in (None, torch.float32):
                raise ValueError(
                    f"a {type(unit).__name__} was wrapped with {precision}, and the model around it with "
                    f"{own['mixed_precision']}: a block may stay in fp32, but not have a 16-bit dtype of its own"
                )
            kept.add(unit)
        return kept if self._precision is not None and self._precision.is_mixed else set()

    @property
    def module(self) -> nn.Module:
        return self._fsdp_wrapped_module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_fsdp_wrapped_module"), name)

    def __getitem__(self, key: int) -> Any:
        return self.module[key]  # type: ignore[index]

    def _shard(self) -> None:
        if self._is_sharded or self._is_sharding:
            return
        self._is_sharding = True
        try:
            self._shard_now()
        finally:
            self._is_sharding = False
        self._is_sharded = True

    def _shard_now(self) -> None:
        precision, units, own = self._precision, self._units, self._fsdp_options["cpu_offload"]
        if precision is not None and self._kept:
            precision = replace(precision, keep=[*(precision.keep or ()), *kept_in_fp32(self._kept)])
        shard(
            self.module,
            stage=self._sharding.stage,
            units=lambda name, module: module in units,
            precision=precision,
            mesh=self._mesh,
            init=self._init,
            device=self._device if self._device.type != "cpu" else None,
            live_bytes=self._sharding.live_bytes,
            offload=offload_of([own, *(unit._fsdp_options["cpu_offload"] for unit in units)], self._sharding.stage),
        )
        engine = Engine.of(self.module)
        follow_optimizers(engine)
        engine.on_close += [partial(take_face, unit, "_fsdp_options", "_fsdp_root") for unit in units]
        mixed = self._fsdp_options["mixed_precision"]
        if mixed is not None and mixed.cast_forward_inputs and mixed.param_dtype is not None:
            cast_inputs(units - self._kept, mixed.param_dtype, engine)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_sharded:
            refuse_call_from_outside(self, "FSDP")
            self._shard()
        return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters as an optimizer must hold them; whole ones inside `summon_full_params`. Names are the model's."""
        self._shard()
        found = self.module.named_parameters(prefix, recurse, remove_duplicate)
        engine = getattr(self.module, "_zerofold_engine", None)  # none while it is being sharded, and after zf.close
        yield from found if engine is None else shown(found, engine)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `state_dict_type` says; whole tensors on every rank by default. All ranks must call it."""
        self._shard()
        options = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
        destination = options.pop("destination", None)  # of a module around it, with what others have put there
        state = shown_state(self.module.state_dict(**options), self._settings.state_dict_config)
        if destination is None:
            return state
        destination.update(state)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(state._metadata)  # type: ignore[attr-defined]
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes whole tensors or sharded ones; each rank keeps its part."""
        self._shard()
        named = {clean(name): value for name, value in state_dict.items()}
        return self.module.load_state_dict(named, strict=strict, assign=assign)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """`fn` sees whole parameters and may change them; what it draws must be the same on all ranks."""
        if not self._is_sharded:
            self.module.apply(fn)
            return self
        with full_params(self.module):
            self.module.apply(fn)
        return self

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward adds up gradients on this rank without communication."""
        self._shard()
        return no_sync(self.module)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips by the norm of all gradients over all ranks, and returns it as it was before."""
        self._shard()
        return clip_grad_norm_(self.module, max_norm, norm_type)

    def check_is_root(self) -> bool:
        """An inner one has no existence of its own: what it wrapped is a unit of the outermost."""
        return True


def _before_load(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A module around the wrapper is loading: the names it has are those without the wrapper."""
    assert isinstance(wrapper, FullyShardedDataParallel)
    wrapper._shard()
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}{WRAPPED}.{clean(name[len(prefix) :])}"] = state.pop(name)


def _after_load(wrapper: nn.Module, incompatible: Any) -> None:
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [clean(name) for name in names]


def _unwrap(module: nn.Module) -> None:
    """Takes inner wrappers out of the tree: what they wrapped stands in their place, as a unit."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if type(child) is FullyShardedDataParallel:
                _mark(child.module, child._fsdp_options)
                parent._modules[name] = child.module


def _mark(block: nn.Module, options: dict[str, Any]) -> None:
    give_face(block, FSDPUnit)
    object.__setattr__(block, "_fsdp_options", options)
