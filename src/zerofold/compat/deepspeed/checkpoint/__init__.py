"""Helpers around checkpoints."""

from zerofold.compat.deepspeed.checkpoint.utils import clone_tensors_for_torch_save

__all__ = ["clone_tensors_for_torch_save"]
