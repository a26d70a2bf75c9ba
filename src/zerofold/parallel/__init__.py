"""Tensor and pipeline parallelism from torch, with ZeRO over the data axis."""
