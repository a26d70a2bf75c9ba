"""The name of the file of variables that are exported to every node."""

from __future__ import annotations

import os

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
