"""zf.initialize: a model, a config file, and what trains them, in DeepSpeed's shape."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zerofold.compat.activations import keep_as
from zerofold.compat.engine import DeepSpeedEngine
from zerofold.compat.engine_checkpoints import keep_config
from zerofold.compat.leaves import leaf_units
from zerofold.compat.mesh_in_use import data_rank, use_mesh
from zerofold.compat.optimizers import make_optimizer
from zerofold.config import ConfigError, Settings, read, resolve
from zerofold.config.settings import FileMonitor
from zerofold.configured import announce, scheduler_of, shard_arguments
from zerofold.engine import Engine
from zerofold.parallel.mesh import Mesh
from zerofold.prepare import attach, close, shard
from zerofold.process_group import group_device, join_or_be_alone, local_device
from zerofold.sharded import ShardedParameter

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]:
    """DeepSpeed's entry point: returns (engine, optimizer, dataloader, lr_scheduler) for a ds_config.json.

    args              where `add_config_arguments` has put --deepspeed_config; or give `config` (a path, a dict, or
                      JSON text, with // comments)
    optimizer         one, or a function of the parameters that makes one; or leave it to the config
    model_parameters  what the config's optimizer trains, as parameters or groups; by default all that want gradients.
                      Others are frozen, and said so
    training_data     a dataset: the loader that comes back gives each rank its share, micro-batch by micro-batch
    lr_scheduler      one, or a function of the optimizer that makes one; or leave it to the config. The engine
                      advances it
    mpu               a `zf.mesh` with a tensor axis: its ranks share the layers, and with partition_activations the
                      inputs of checkpoints; they must get the same batch, as the loader gives it to them

    The process group is started if there is none. Every key of the config is honoured, or mapped to what zerofold
    does instead, which is printed once, or refused; the config as resolved is `engine.config`, and is written to
    ds_config.resolved.json in the folders of monitors that the config names, and beside checkpoints.

    >>> import torch, zerofold as zf
    >>> config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    ...           "zero_optimization": {"stage": 2}}
    >>> engine, optimizer, _, _ = zf.initialize(model=torch.nn.Linear(4, 1), config=config)
    train_batch_size 8 = 8 per rank x 1 accumulated x 1 rank
    gradient_clipping: not given, so 1.0, which is DeepSpeed's default; 0 switches it off
    >>> loss = engine(torch.ones(8, 4)).mean()
    >>> _ = engine.backward(loss); engine.step()
    >>> engine.global_steps, engine.was_step_applied()
    (1, True)
    >>> engine.destroy()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize needs model=, a torch.nn.Module, not {type(model).__name__}")
    _check_mesh(mpu, mesh_param)
    given_config = read(_one_config(args, config, config_params))
    device = init_distributed(distributed_port=distributed_port, auto=dist_init_required is not False, device_of=model)
    use_mesh(mpu)
    ranks = dist.get_world_size() if mpu is None else mpu.data * mpu.replicate
    settings = resolve(given_config, world=ranks, device=device, model=model)
    announce(settings, optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)
    if given_config.get("activation_checkpointing"):
        keep_as(settings.activation_checkpointing, mpu)
    if dist.get_rank() == 0:
        _keep(settings)
    if not any(p.is_meta or isinstance(p, ShardedParameter) for p in model.parameters()):
        model.to(device)
    chosen = _optimizer(model, optimizer, model_parameters, settings, device)
    frozen = _freeze_others(model, chosen)
    try:
        arguments = shard_arguments(settings, chosen, mpu)
        # The engine says itself which backward ends a step. Sums of several need memory of their own, all the same.
        shard(model, units=leaf_units(model, None), accumulate=settings.accumulate, **arguments)
        if chosen is not None:
            attach(model, chosen, clip=settings.clip)
            chosen.overflow = False  # type: ignore[attr-defined]  # where Accelerate looks for it
        scheduler = _scheduler(chosen, lr_scheduler, settings)
        loader = None if training_data is None else make_loader(training_data, settings, collate_fn, device, mpu)
    except Exception:
        if Engine.is_on(model) and not Engine.is_broken(model):
            close(model)
        for parameter in frozen:
            parameter.requires_grad_(True)
        raise
    engine = DeepSpeedEngine(model, chosen, scheduler, settings, loader=loader, frozen=frozen)
    return engine, chosen, loader, scheduler


def _check_mesh(mpu: Any, mesh_param: Any) -> None:
    if mesh_param is not None:
        raise ValueError(f"mesh_param={mesh_param!r}: give mpu=zf.mesh(data=..., tensor=...) instead")
    if mpu is None:
        return
    if not isinstance(mpu, Mesh):
        raise ValueError(
            f"mpu={type(mpu).__name__}: give zf.mesh(tensor=...), which knows which ranks share a layer and which have "
            "other samples"
        )
    if mpu.pipeline > 1:
        raise ValueError(
            f"mpu: pipeline={mpu.pipeline}: the engine of zf.initialize has no stages; use zf.pipeline and "
            "zf.prepare(mesh=...)"
        )


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
    *,
    auto: bool = True,
    device_of: nn.Module | None = None,
) -> torch.device:
    """Starts the process group from the environment if there is none; a script started alone is a world of one.

    >>> import zerofold.compat.initialize as ds
    >>> ds.init_distributed().type in ("cpu", "cuda")
    True
    """
    if not dist.is_initialized():
        if not auto or dist_init_required is False:
            raise RuntimeError(
                "dist_init_required=False, and there is no process group: call torch.distributed.init_process_group()"
            )
        if init_method is not None:
            dist.init_process_group(
                dist_backend or ("nccl" if torch.cuda.is_available() else "gloo"),
                init_method=init_method,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
            return local_device()
        if distributed_port is not None:
            os.environ.setdefault("MASTER_PORT", str(distributed_port))
        return join_or_be_alone(timeout=timeout)
    if device_of is not None:
        found = next((p.device for p in device_of.parameters() if p.device.type not in ("cpu", "meta")), None)
        if found is not None:
            return found
    return group_device()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config, which `initialize(args=...)` reads, and --local_rank.

    >>> import argparse, zerofold as zf
    >>> parser = zf.add_config_arguments(argparse.ArgumentParser())
    >>> parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"]).deepspeed_config
    'ds.json'
    """
    if not isinstance(parser, argparse.ArgumentParser):
        raise TypeError(f"add_config_arguments takes an argparse.ArgumentParser, not a {type(parser).__name__}")
    group = parser.add_argument_group("zerofold", "configuration")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train with zerofold's engine")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the ds_config.json to use")
    held = {option for action in parser._actions for option in action.option_strings}
    if not held.intersection({"--local_rank", "--local-rank"}):
        group.add_argument(
            "--local_rank", "--local-rank", default=-1, type=int, help="ignored: the launcher's environment counts"
        )
    return parser


def _one_config(args: Any, config: Any, config_params: Any) -> Any:
    named = getattr(args, "deepspeed_config", None) if args is not None else None
    found = [each for each in (named, config, config_params) if each is not None]
    if not found:
        raise ConfigError(
            "initialize needs a config: config='ds_config.json' (a path, a dict or JSON text), or args with "
            "--deepspeed_config"
        )
    if len(found) > 1:
        raise ConfigError(
            f"initialize was given {len(found)} configs (args.deepspeed_config, config=, config_params=): give one"
        )
    return found[0]


def _keep(settings: Settings) -> None:
    """Beside what else the run writes."""
    for monitor in settings.monitors:
        if isinstance(monitor, FileMonitor):
            keep_config(settings.resolved, Path(monitor.output_path) / monitor.job_name)


def _optimizer(
    model: nn.Module,
    given: torch.optim.Optimizer | MakeOptimizer | None,
    parameters: Parameters | None,
    settings: Settings,
    device: torch.device,
) -> torch.optim.Optimizer | None:
    trained = list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    if isinstance(given, torch.optim.Optimizer):
        return given
    if callable(given):
        made = given(trained)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"optimizer: the function gave a {type(made).__name__}, not a torch.optim.Optimizer")
        return made
    if given is not None:
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or a function, not {type(given).__name__}")
    if settings.optimizer is None:
        return None
    return make_optimizer(settings.optimizer.type, settings.optimizer.params, trained, device=device)


def _freeze_others(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """DeepSpeed reduces and updates what its optimizer has; the rest stays as it is. Here it is frozen, and said so."""
    if optimizer is None:
        return []
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    for _, parameter in others:
        parameter.requires_grad_(False)
    if others and dist.get_rank() == 0:
        print(f"zerofold: {len(others)} parameter(s) are not in the optimizer, first '{others[0][0]}': frozen")
    return [parameter for _, parameter in others]


def _scheduler(optimizer: torch.optim.Optimizer | None, given: Any, settings: Settings) -> Any:
    if given is not None and not hasattr(given, "step"):
        if not callable(given):
            raise TypeError(f"lr_scheduler must be a scheduler or a function, not {type(given).__name__}")
        if optimizer is None:
            raise ValueError('lr_scheduler needs an optimizer: give one, or an "optimizer" section in the config')
        return given(optimizer)
    if given is not None or settings.scheduler is None or optimizer is None:
        return given
    return scheduler_of(settings, optimizer)


class Loader(DataLoader[Any]):
    """A loader whose sampler draws a new order in every epoch by itself."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(self.sampler.epoch + 1)


def make_loader(
    data: Dataset[Any],
    settings: Settings,
    collate_fn: Callable[[list[Any]], Any] | None,
    device: torch.device,
    mesh: Mesh | None = None,
) -> DataLoader[Any]:
    """This rank's micro-batches, shuffled as torch's sampler does it. Ranks that share a model read the same."""
    is_iterable = isinstance(data, IterableDataset)
    if not is_iterable and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise TypeError(f"training_data must be a torch Dataset, not {type(data).__name__}")
    sampler: DistributedSampler[Any] | None = None
    if not is_iterable:
        rank = dist.get_rank() if mesh is None else data_rank(mesh)
        sampler = DistributedSampler(data, settings.world, rank, drop_last=settings.dataloader_drop_last)
    return Loader(
        data,
        batch_size=settings.micro_batch,
        sampler=sampler,
        drop_last=settings.dataloader_drop_last,
        collate_fn=collate_fn,
        pin_memory=device.type == "cuda",
    )
