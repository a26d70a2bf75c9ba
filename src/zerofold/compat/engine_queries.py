"""What scripts ask a DeepSpeed engine about its settings, answered from the resolved config."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from zerofold.config import Settings


class Queries:
    """The small methods of an engine that only look things up, and those that set the batch."""

    settings: Settings
    _batch: tuple[int, int, int]  # of a step; of a micro-batch; micro-batches in a step
    _count_to_boundary: Callable[[], None]

    def train_batch_size(self) -> int:
        return self._batch[0]

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch[1]

    def gradient_accumulation_steps(self) -> int:
        return self._batch[2]

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples in a step, samples in a micro-batch on a rank, micro-batches in a step."""
        return self._batch

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of samples in a step, by another number of micro-batches."""
        _, micro, _ = self._batch
        at_once = micro * self.dp_world_size
        if not isinstance(train_batch_size, int) or train_batch_size < 1 or train_batch_size % at_once:
            raise ValueError(
                f"train_batch_size={train_batch_size!r} must be a multiple of {at_once} = {micro} per rank x "
                f"{self.dp_world_size} ranks"
            )
        self._batch = (train_batch_size, micro, train_batch_size // at_once)
        self._count_to_boundary()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another number of samples in a micro-batch; as many micro-batches in a step as before."""
        if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size!r} must be a whole number of at least 1")
        accumulate = self._batch[2]
        self._batch = (micro_batch_size * accumulate * self.dp_world_size, micro_batch_size, accumulate)

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Another number of micro-batches in a step, each of as many samples as before."""
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"gradient_accumulation_steps={steps!r} must be a whole number of at least 1")
        self.set_train_batch_size(self._batch[1] * self.dp_world_size * steps)

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def dp_world_size(self) -> int:
        """Ranks with other samples."""
        return self.settings.world

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return int(self.settings.resolved.get("zero_optimization", {}).get("stage", 0))

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self.settings.gather_16bit_on_save

    def gradient_clipping(self) -> float:
        return self.settings.clip or 0.0

    def fp16_enabled(self) -> bool:
        return self._compute_dtype() is torch.float16

    def bfloat16_enabled(self) -> bool:
        return self._compute_dtype() is torch.bfloat16

    def _compute_dtype(self) -> torch.dtype | None:
        return None if self.settings.precision is None else self.settings.precision.parameters

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the model's computation, and of its gradients' sums."""
        compute = self._compute_dtype() or torch.float32
        policy = self.settings.precision
        return compute, (policy.accumulation if policy is not None else None) or torch.float32

    def optimizer_name(self) -> str | None:
        return self.settings.resolved.get("optimizer", {}).get("type")

    def optimizer_params(self) -> dict[str, Any] | None:
        return self.settings.resolved.get("optimizer", {}).get("params")

    def scheduler_name(self) -> str | None:
        return self.settings.resolved.get("scheduler", {}).get("type")

    def scheduler_params(self) -> dict[str, Any] | None:
        return self.settings.resolved.get("scheduler", {}).get("params")

    def steps_per_print(self) -> int | None:
        return self.settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self.settings.wall_clock_breakdown

    def dataloader_drop_last(self) -> bool:
        return self.settings.dataloader_drop_last
