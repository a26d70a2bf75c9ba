"""The engine's class, for isinstance and annotations."""

from zerofold.compat.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
