"""The error of a config that cannot be used."""

from zerofold.config import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError"]
