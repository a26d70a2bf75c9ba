"""Activation checkpointing under DeepSpeed's name."""

from zerofold.compat.deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
