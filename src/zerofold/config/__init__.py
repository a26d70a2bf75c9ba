"""A DeepSpeed config read, checked and resolved: every key is honoured, or mapped and said so, or refused with why."""

from zerofold.config.errors import ConfigError
from zerofold.config.keys import Note
from zerofold.config.reading import read
from zerofold.config.resolving import resolve
from zerofold.config.settings import (
    CommsLogger,
    Component,
    FileMonitor,
    FlopsProfiler,
    Settings,
    WandbMonitor,
)

__all__ = [
    "CommsLogger",
    "Component",
    "ConfigError",
    "FileMonitor",
    "FlopsProfiler",
    "Note",
    "Settings",
    "WandbMonitor",
    "read",
    "resolve",
]
