"""The name under which DeepSpeed keeps its Adam for the host."""

from zerofold.compat.deepspeed.ops.adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam
