"""The name under which DeepSpeed keeps the choice of its accelerator."""

from zerofold.compat.deepspeed.accelerator import get_accelerator as get_accelerator
