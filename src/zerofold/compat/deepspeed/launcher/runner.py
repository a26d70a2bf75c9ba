"""The name of the file of variables that are exported to every node."""

from __future__ import annotations

import os

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")


def main(args: object = None) -> None:
    """What the command `deepspeed` calls, where DeepSpeed is installed and this stands in for it."""
    raise SystemExit("zerofold stands in for deepspeed here: start scripts with `zerofold launch --as-deepspeed ...`")
