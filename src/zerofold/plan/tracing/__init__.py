"""The true activation sizes of any model, found by running it on tensors that have shapes and no memory."""

from zerofold.plan.tracing.trace import trace

__all__ = ["trace"]
