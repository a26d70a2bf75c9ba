"""deepspeed.checkpointing on zf.checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zerofold.activation.checkpointing import checkpoint as checkpoint_activations
from zerofold.compat.activations import keep_as, keeping
from zerofold.compat.deepspeed.utils.logging import logger, print_rank_0
from zerofold.config import read
from zerofold.parallel.mesh import Mesh


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function` and forgets what it computed inside; backward runs it again.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> checkpoint(torch.square, x).sum().backward(); x.grad
    tensor([2., 2.])
    """
    return _checkpoint(function, args, use_reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return _checkpoint(function, args, use_reentrant=False)


def _checkpoint(function: Callable[..., Any], args: Any, *, use_reentrant: bool) -> Any:
    how = keeping()
    if how.profiles:
        function = _Timed(function).run
    if how.synchronizes:
        _synchronize()
    result = checkpoint_activations(function, *args, use_reentrant=use_reentrant, store=how.store)
    if how.synchronizes:
        _synchronize()
    return result


class _Timed:
    """A function that says what each of its calls took, the device's work included."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._calls = 0

    def run(self, *args: Any) -> Any:
        when = "in backward, again" if self._calls else "in forward"
        self._calls += 1
        _synchronize()
        start = time.perf_counter()
        try:
            return self._function(*args)
        finally:  # torch ends a second call by an exception, as soon as it has what backward wants
            _synchronize()
            milliseconds = 1e3 * (time.perf_counter() - start)
            name = getattr(self._function, "__name__", type(self._function).__name__)
            print_rank_0(f"checkpoint of {name}: {milliseconds:.2f} ms {when}")


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Says how inputs are kept from now on; what is given here counts before the config.

    `mpu_` knows the tensor ranks, over which partition_activations cuts inputs: Megatron's, or a `zf.mesh`. All of
    them must call this.

    >>> configure(checkpoint_in_cpu=True)
    >>> x = torch.ones(2, requires_grad=True)
    >>> checkpoint(torch.square, x).sum().backward(); x.grad
    tensor([2., 2.])
    >>> configure()
    """
    section: dict[str, Any] = {}
    if deepspeed_config is not None:
        section = dict(read(deepspeed_config).get("activation_checkpointing") or {})
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section |= {name: value for name, value in given.items() if value is not None}
    tensor_ranks = _tensor_ranks(mpu_)
    keep_as(section, tensor_ranks)
    if section.get("partition_activations") and tensor_ranks is None:
        logger.warning(
            "deepspeed.checkpointing.configure: partition_activations: there are no tensor ranks to cut inputs over, "
            "so they are kept whole: give mpu_=, or what zf.mesh(tensor=…) returned"
        )


def _tensor_ranks(mpu: Any) -> Mesh | dist.ProcessGroup | None:
    """As DeepSpeed asks for them: newer ones by the name of the axis."""
    if mpu is None or isinstance(mpu, Mesh):
        return mpu
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            found: dist.ProcessGroup = getattr(mpu, name)()
            return found
    raise ValueError(
        f"mpu_={type(mpu).__name__} has neither get_tensor_model_parallel_group nor get_model_parallel_group: give one "
        "that has, or what zf.mesh(tensor=…) returned"
    )


def is_configured() -> bool:
    """Always: there is nothing that has to be configured first.

    >>> is_configured()
    True
    """
    return True


def reset() -> None:
    """Memory for inputs that are kept is free as soon as nothing needs them; there is nothing to be dropped."""
