"""The name under which DeepSpeed keeps its Adam for accelerators."""

from zerofold.compat.deepspeed.ops.adam import FusedAdam as FusedAdam
