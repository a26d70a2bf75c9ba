"""zf.Accelerator: the training loop of Hugging Face Accelerate on zerofold."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from zerofold.access import no_sync
from zerofold.compat.accelerator_config import OF_ACCELERATE, config_of, options_of, refuse_others
from zerofold.compat.accelerator_data import PreparedLoader
from zerofold.compat.accelerator_gather import Gathering
from zerofold.compat.accelerator_ranks import Ranks
from zerofold.compat.accelerator_saving import Saved
from zerofold.compat.accelerator_steps import Micro, PreparedOptimizer, PreparedScheduler, engine_around, gradients_of
from zerofold.config import ConfigError, Settings
from zerofold.configured import Config, scheduler_of
from zerofold.engine import Engine
from zerofold.optim.cost import update_cost
from zerofold.precision import Precision
from zerofold.prepare import attach, close, prepare, shard
from zerofold.units import UnitChoice

_PRECISIONS = {
    None: None,
    "no": None,
    "fp16": Precision(parameters=torch.float16, outputs=torch.float32),
    "bf16": Precision(parameters=torch.bfloat16, outputs=torch.float32),
}
_OPTIONS = frozenset(inspect.signature(prepare).parameters) - {"model", "optimizer"}
_OF_ATTACH = _OPTIONS - frozenset(inspect.signature(shard).parameters)


class Accelerator(Ranks, Saved, Gathering):
    """Accelerate's training loop: prepare, backward, accumulate, clip, gather, save; the model is sharded by zerofold.

    mixed_precision              "no", "bf16" or "fp16": forward and backward in 16 bits with fp32 masters; outputs fp32
    gradient_accumulation_steps  micro-batches in a step: `with accelerator.accumulate(model)`
    cpu                          train on the CPU though there is an accelerator
    stage, units                 as in zf.prepare; stage 3 by default
    config                       a ds_config.json (its path, a dict or JSON text) that says stage, precision, clipping
                                 and accumulation instead
    deepspeed_plugin             Accelerate's: its config is taken
    prepare_options              further arguments of zf.prepare: {"clip": 1.0, "mesh": mesh, ...}
    split_batches                a loader's batch_size is that of all ranks together, not of each
    even_batches                 fill up the last batches, so that every rank has as many
    device_placement             put the model and the batches on this rank's device
    step_scheduler_with_optimizer
                                 False: a scheduler's step() always steps, once
    project_dir                  where `save_state()` without a folder writes

    The process group is started if there is none; a script started alone is a world of one.

    >>> import torch
    >>> from zerofold.compat.accelerator import Accelerator
    >>> accelerator = Accelerator(stage=2)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
    >>> model, optimizer, data = accelerator.prepare(model, optimizer, data)
    >>> for x in data:
    ...     loss = model(x).square().mean()
    ...     accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
    >>> _ = accelerator.free_memory()
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        stage: int | str | None = None,
        units: UnitChoice = None,
        config: Config | None = None,
        deepspeed_plugin: Any = None,
        prepare_options: Mapping[str, Any] | None = None,
        split_batches: bool = False,
        even_batches: bool = True,
        device_placement: bool = True,
        step_scheduler_with_optimizer: bool = True,
        project_dir: str | None = None,
        **others: Any,
    ) -> None:
        refuse_others(others)
        if mixed_precision not in _PRECISIONS:
            raise ValueError(f"mixed_precision={mixed_precision!r} does not exist; choose 'no', 'bf16' or 'fp16'")
        if not isinstance(gradient_accumulation_steps, int) or gradient_accumulation_steps < 1:
            raise ValueError(f"gradient_accumulation_steps={gradient_accumulation_steps!r} must be at least 1")
        options = dict(prepare_options or {})
        for name in options:
            if name not in _OPTIONS:
                raise ValueError(f"prepare_options: zf.prepare has no {name!r}; it has {', '.join(sorted(_OPTIONS))}")
        self._config = config_of(config, deepspeed_plugin)
        said = {"stage": stage, "mixed_precision": mixed_precision, "prepare_options": prepare_options}
        for name, value in said.items() if self._config is not None else ():
            if value is not None:
                raise ConfigError(
                    f"{name}={value!r} and a config are both given: change the config, or leave {name} out"
                )
        Ranks.__init__(self, cpu=cpu)
        Saved.__init__(self, project_dir)
        self.mixed_precision = mixed_precision or "no"
        self.split_batches, self.even_batches, self.device_placement = split_batches, even_batches, device_placement
        self._options = {
            "stage": 3 if stage is None else stage,
            "units": units,
            "precision": _PRECISIONS[mixed_precision],
            **options,
        }
        self._settings: Settings | None = None  # what the config came to
        self._with_optimizer = step_scheduler_with_optimizer
        self._micro = Micro(gradient_accumulation_steps)
        Gathering.__init__(self)

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property whose own code raised: that error is the one to tell
            return object.__getattribute__(self, name)
        raise AttributeError(f"zf.Accelerator has no {name!r}; {OF_ACCELERATE}")

    # preparing

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Models, optimizers, data loaders and schedulers, in any order; comes back in the same order.

        A model is sharded in place, with the optimizers that hold its parameters; the same object comes back. Whatever
        is none of the four comes back as it is.
        """
        places = device_placement or [self.device_placement] * len(objects)
        for each in objects:
            if type(each).__name__ in ("DummyOptim", "DummyScheduler"):
                raise TypeError(
                    f"prepare: give a torch optimizer or scheduler in the place of the {type(each).__name__}"
                )
        optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        sizes = [each.batch_size for each in objects if isinstance(each, DataLoader)]
        before = list(self._models)
        for each, placed in zip(objects, places, strict=True):
            if isinstance(each, nn.Module):
                self._prepare_model(each, optimizers, placed=placed, batch_size=next(iter(sizes), None))
        try:
            schedules = any(isinstance(each, (LRScheduler, ReduceLROnPlateau)) for each in objects)
            self._attach([each for each in optimizers if not self._is_prepared(each)], schedules=schedules)
        except Exception:
            for model in self._models[len(before) :]:
                close(model)
            self._models = before
            raise
        found = [self._prepared(each, placed) for each, placed in zip(objects, places, strict=True)]
        return found[0] if len(found) == 1 else tuple(found)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None) -> Any:
        return self.prepare(model, device_placement=None if device_placement is None else [device_placement])

    def prepare_data_loader(self, data_loader: DataLoader[Any]) -> Any:
        return self.prepare(data_loader)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        return self.prepare(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        return self.prepare(scheduler)

    def _is_prepared(self, optimizer: torch.optim.Optimizer) -> bool:
        return isinstance(optimizer, PreparedOptimizer) or any(o.optimizer is optimizer for o in self._optimizers)

    def _prepare_model(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], *, placed: bool, batch_size: int | None
    ) -> None:
        if model in self._models:
            return
        if placed and not any(tensor.is_meta for tensor in model.parameters()):
            model.to(self.device)
        if not any(parameter.numel() for parameter in model.parameters()):
            return  # a loss function, for instance
        held = {id(parameter) for parameter in model.parameters()}
        own = [each for each in optimizers if any(id(p) in held for g in each.param_groups for p in g["params"])]
        if self._config is not None:
            found = options_of(self._config, model, own, self.device, self._micro.accumulate, batch_size)
            self._micro.accumulate = found.accumulate
            self._options |= found.options
            self._settings = found.settings
        options = {name: value for name, value in self._options.items() if name not in _OF_ATTACH}
        if own:
            options["cost"] = options.get("cost") or update_cost(own[0])
        shard(model, **options)
        self._models.append(model)

    def _attach(self, optimizers: list[torch.optim.Optimizer], *, schedules: bool) -> None:
        """A schedule that the config names advances with every step, unless one was given."""
        options = {name: value for name, value in self._options.items() if name in _OF_ATTACH}
        for each in optimizers:
            self._check_is_of_one_model(each)
        for model in self._models:
            faces = Engine.of(model).faces()
            own = [each for each in optimizers if any(id(p) in faces for g in each.param_groups for p in g["params"])]
            if own:
                if self._settings is not None and not schedules:
                    options["scheduler"] = scheduler_of(self._settings, own[0])
                attach(model, *own, **options)
                self._optimizers += [PreparedOptimizer(each, model, self._micro) for each in own]
        for each in optimizers:
            if not self._is_prepared(each):
                raise ValueError(
                    f"prepare: this {type(each).__name__} holds no parameter of a prepared model; give its model to "
                    "prepare with it, or before"
                )

    def _check_is_of_one_model(self, optimizer: torch.optim.Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owners = [model for model in self._models if held & Engine.of(model).faces().keys()]
        if len(owners) > 1:
            names = " and ".join(f"the {type(model).__name__}" for model in owners)
            raise ValueError(
                f"prepare: this {type(optimizer).__name__} holds parameters of {len(owners)} models, {names}: make one "
                "optimizer for each model, or put the models into one nn.ModuleDict and prepare that as the model"
            )

    def _prepared(self, each: Any, placed: bool) -> Any:
        if isinstance(each, torch.optim.Optimizer) and not isinstance(each, PreparedOptimizer):
            return next(o for o in self._optimizers if o.optimizer is each)
        if isinstance(each, DataLoader):
            device = self.device if placed else None
            loader = PreparedLoader(each, device, self._active, split=self.split_batches, even=self.even_batches)
            self._loaders.append(loader)
            return loader
        if isinstance(each, (LRScheduler, ReduceLROnPlateau)):
            own = [o for o in self._optimizers if each.optimizer in (o, o.optimizer)] or self._optimizers
            times = 1 if self.split_batches else self.num_processes
            scheduler = PreparedScheduler(each, own, self._micro, times, with_optimizer=self._with_optimizer)
            self._schedulers.append(scheduler)
            return scheduler
        return each

    # training

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends a step."""
        return self._micro.sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._micro.accumulate

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._micro.accumulate = steps

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """The last step found a gradient that was not finite, and changed nothing."""
        return any(each.step_was_skipped for each in self._optimizers)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch: optimizers, schedulers and zero_grad do nothing inside until the last of a step.

        The last batch of a loader always ends a step. Where gradients stay whole, only the last micro-batch of a step
        communicates them.
        """
        self._micro.advance(at_end=bool(self._active) and self._active[-1].is_last)
        engines = [engine_around(model) for model in models or self._models]
        reductions = [engine.reductions for engine in engines if engine is not None]
        for each in reductions:
            each.ends_step = self.sync_gradients
        try:
            yield
        finally:
            for each in reductions:
                each.ends_step = None

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward adds up gradients on this rank without communication."""
        return no_sync(model)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward of the loss divided by the micro-batches of a step."""
        (loss / self.gradient_accumulation_steps).backward(**kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the gradients of these parameters by their norm over all ranks; returns it as it was before."""
        parts = gradients_of(self._models, parameters)
        norms = [part.norm(norm_type) for part in parts]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
        for part in parts:
            part.multiply(part.coefficient(max_norm, norm))
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        for part in gradients_of(self._models, parameters):
            part.clamp(clip_value)

    def autocast(self) -> AbstractContextManager[None]:
        """Nothing to do: the model casts its inputs itself."""
        return nullcontext()

    def skip_first_batches(self, dataloader: PreparedLoader, num_batches: int = 0) -> PreparedLoader:
        """The next pass begins at this batch. After `load_state`, which knows the position, it changes nothing."""
        if not isinstance(dataloader, PreparedLoader):
            raise TypeError(
                f"skip_first_batches: a {type(dataloader).__name__} was given; give the loader that prepare returned"
            )
        dataloader.skip_to(num_batches)
        return dataloader

    def free_memory(self, *objects: Any) -> list[None]:
        """Lets go of all that was prepared; models have whole parameters again. All ranks must call it."""
        for model in self._models:
            close(model)
        for held in (self._models, self._optimizers, self._schedulers, self._loaders, self._custom):
            held.clear()
        self._micro.count, self._micro.sync_gradients = 0, True
        return [None] * len(objects)

    clear = free_memory

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        raise ValueError("log: trackers are not part of this; write to yours where accelerator.is_main_process")

    def init_trackers(self, project_name: str, **kwargs: Any) -> None:
        raise ValueError("init_trackers: trackers are not part of this; make yours where accelerator.is_main_process")
