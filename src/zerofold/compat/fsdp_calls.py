"""The calls that torch's FSDP offers as static methods: they take the model, wherever in it the wrapper is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from zerofold.access import full_params
from zerofold.compat.fsdp_states import WRAPPED, optimizer_state, optimizer_state_to_load, settings_of
from zerofold.engine import Engine


class FSDPUnit:
    """Mixed into the class of a block that is gathered as one: for `isinstance(block, FullyShardedDataParallel)`."""

    _fsdp_options: dict[str, Any]
    _fsdp_root: ref[Any]


def wrappers_of(module: nn.Module) -> list[Any]:
    """The FSDP wrappers that hold the states of a module: itself, those inside it, or the one around it."""
    if isinstance(module, FSDPUnit):
        around = module._fsdp_root() if hasattr(module, "_fsdp_root") else None
        found = [] if around is None else [around]
    else:
        found = [each for each in module.modules() if WRAPPED in each._modules]
    if not found:
        raise ValueError(f"this {type(module).__name__} is not wrapped by FSDP, and nothing in it is")
    for wrapper in found:
        wrapper._shard()
    return found


class FSDPCalls:
    """Static methods of FullyShardedDataParallel."""

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        """The wrappers and the blocks that are units."""
        found = [each for each in module.modules() if WRAPPED in each._modules or isinstance(each, FSDPUnit)]
        return [each for each in found if not (root_only and isinstance(each, FSDPUnit))]

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Inside, parameters are whole ordinary ones. Changes are kept, and must be the same on all ranks.

        All ranks hold all of the model, whatever `recurse` and `rank0_only` say.
        """
        if with_grads:
            raise ValueError("summon_full_params(with_grads=True): read a whole gradient with zf.full_grad(parameter)")
        if writeback and rank0_only:
            raise ValueError(
                "summon_full_params(writeback=True, rank0_only=True): the ranks would hold different weights; make the "
                "same change on all, or use zf.full_params(model, from_rank=0)"
            )
        engines = [Engine.of(wrapper.module) for wrapper in wrappers_of(module)]
        if offload_to_cpu and any(engine.groups.gather.device.type != "cpu" for engine in engines):
            raise ValueError(
                "summon_full_params(offload_to_cpu=True): parameters stay on the device; for copies in host memory "
                "call model.state_dict() inside state_dict_type(FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu))"
            )
        with ExitStack() as stack:
            for engine in engines:
                stack.enter_context(full_params(engine.model) if writeback else _to_read(engine))
            yield

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Chooses what `state_dict()` and `optim_state_dict` give from now on; returns what it was."""
        chosen = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        before = [wrapper._settings for wrapper in wrappers_of(module)]
        for wrapper in wrappers_of(module):
            wrapper._settings = chosen
        return before[0]

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        found: StateDictSettings = wrappers_of(module)[0]._settings
        return found

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Inside, `state_dict()` and `optim_state_dict` give this kind."""
        before = [(wrapper, wrapper._settings) for wrapper in wrappers_of(module)]
        FSDPCalls.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for wrapper, settings in before:
                wrapper._settings = settings

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """An optimizer's state by the names of parameters; whole tensors by default. All ranks must call it."""
        if optim_state_dict is not None:
            raise ValueError("optim_state_dict: it is read from the optimizer itself; leave the third argument out")
        (wrapper,) = wrappers_of(model)
        return optimizer_state(wrapper.module, optim, wrapper._settings.optim_state_dict_config)

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """The same with whole tensors in host memory, on rank 0 alone by default."""
        (wrapper,) = wrappers_of(model)
        return optimizer_state(wrapper.module, optim, FullOptimStateDictConfig(True, rank0_only))

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from what `optim_state_dict` gave. All ranks must call it.

        Whole tensors may be on rank 0 alone, and {} on the others.
        """
        (wrapper,) = wrappers_of(model)
        found = optimizer_state_to_load(wrapper.module, optim, optim_state_dict)
        if load_directly:
            optim.load_state_dict(found)
        return found

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """The same under its older name."""
        if optim is None:
            raise ValueError("shard_full_optim_state_dict: pass optim=, the optimizer that will load it")
        return FSDPCalls.optim_state_dict_to_load(model, optim, full_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The same where rank 0 alone has it, and the others pass None."""
        if optim is None:
            raise ValueError("scatter_full_optim_state_dict: pass optim=, the optimizer that will load it")
        return FSDPCalls.optim_state_dict_to_load(model, optim, full_optim_state_dict or {})

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """An optimizer's state by the names of parameters, each rank with its own part."""
        (wrapper,) = wrappers_of(model)
        return optimizer_state(wrapper.module, optim, ShardedOptimStateDictConfig())

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from what `sharded_optim_state_dict` gave."""
        return FSDPCalls.optim_state_dict_to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def rekey_optim_state_dict(optim_state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        raise ValueError(
            "rekey_optim_state_dict: states have the names of parameters; FSDP.optim_state_dict_to_load(model, "
            "optimizer, states) gives what the optimizer loads"
        )

    def register_comm_hook(self, state: object, hook: Any) -> None:
        raise ValueError(
            "register_comm_hook: gradients are reduced by zerofold itself; for the dtype they travel in use "
            "mixed_precision=MixedPrecision(reduce_dtype=...)"
        )


@contextmanager
def _to_read(engine: Engine) -> Iterator[None]:
    """Whole parameters of which no change is kept."""
    engine.settle()
    engine.hold_all(masters=True)
    own = [slab for slab in engine.slabs() if not slab.has_own_shard]  # what is shown is all there is of them
    before = [slab.values.clone() for slab in own]
    try:
        yield
    finally:
        for slab, values in zip(own, before, strict=True):
            slab.values.data.copy_(values)
        for slab in engine.slabs():
            slab.mark_changed()  # what was shown may have been changed: the next use makes it anew
        engine.let_go()
