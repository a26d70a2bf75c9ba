"""What takes the place of modules that other ranks of a pipeline have, so that the model's own forward runs as ever.

stage 1 of 3 runs

embedding      block 0    block 1    block 2    block 3    block 4      norm, head
zeros          hands on   RECEIVED   own        own        STOPS        never reached
                          in its                           what it is
                          place                            given is sent on

The original forward computes masks, positions and rotary tables on the way. What it makes of the stream before the
first own block is thrown away, and nothing after the last one runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from zerofold.nested import tensors_in


class Reached(Exception):
    """The forward has come to the first block of the next stage, with this stream."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__("the end of a pipeline's stage")
        self.stream = stream


class Failure(NamedTuple):
    """What a stage of this rank has raised in a forward."""

    stage: int
    error: Exception


@dataclass
class Course:
    """What the stand-ins of one model need to know of the stage that runs now."""

    first: int = 0  # own blocks of that stage
    stop: int | None = None  # None: no stage runs
    received: Tensor | None = None
    was_received: bool = False  # a block got it
    dtype: torch.dtype | None = None  # of the stream, once it is known
    length_of_output: int | None = None  # of the tuple that a block returns, the stream in front; None for a tensor
    failure: Failure | None = None  # in the step that runs


class StandIn(nn.Module):
    """Holds the parameters that a module of this rank holds as well (tied ones), under the names they have here."""

    def __init__(self, name: str, original: nn.Module, shared: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.name, self.stands_for, self.training = name, type(original), original.training
        for attribute, parameter in shared.items():
            self.register_parameter(attribute, parameter)

    def __getattr__(self, attribute: str) -> Any:
        try:
            return super().__getattr__(attribute)
        except AttributeError:
            raise AttributeError(
                f"'{self.name}' is on another rank of the pipeline, and the model's forward asks here for its "
                f"'{attribute}': let a module of the stage that needs it hold it too (head.weight = embedding.weight)"
            ) from None

    def extra_repr(self) -> str:
        return f"{self.stands_for.__name__} '{self.name}' is on another rank"


class BlockStandIn(StandIn):
    """For a block of another stage."""

    def __init__(self, name: str, original: nn.Module, index: int, course: Course) -> None:
        super().__init__(name, original, {})
        self.index, self.course = index, course
        show_plain_attributes(original, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        course, stream = self.course, stream_of(self.name, args, kwargs)
        if course.stop is None:
            raise RuntimeError(
                f"'{self.name}' is on another rank of the pipeline, so the model cannot be called by itself: use "
                "pipe.step(...), or pipe.evaluate(...) without gradients"
            )
        if self.index >= course.stop:
            self._check_besides(stream, args, kwargs)
            raise Reached(stream)
        if self.index != course.first - 1:
            return in_form(stream, course.length_of_output)
        received = course.received
        assert received is not None, "a stage after the first one has something to go on from"
        course.was_received = True
        return in_form(received, course.length_of_output)

    def _check_besides(self, stream: Tensor, args: Any, kwargs: Any) -> None:
        """Where earlier blocks hand on more than the stream, as T5's do their position bias, nobody would send it."""
        besides = (tensor for tensor in tensors_in((args, kwargs)) if tensor is not stream and tensor.requires_grad)
        found = next(besides, None)
        if found is not None:
            raise ValueError(
                f"'{self.name}' is given a tensor of shape {tuple(found.shape)} that blocks of an earlier stage have "
                f"computed, beside the stream of {tuple(stream.shape)}: a pipeline sends the stream alone"
            )


class EmbeddingStandIn(StandIn):
    """Zeros as an embedding would give them."""

    def __init__(self, name: str, original: nn.Embedding, shared: dict[str, nn.Parameter], course: Course) -> None:
        super().__init__(name, original, shared)
        self.embedding_dim, self.num_embeddings = original.embedding_dim, original.num_embeddings
        self.course = course

    def forward(self, indices: Tensor) -> Tensor:
        shape = (*indices.shape, self.embedding_dim)
        return torch.zeros(shape, dtype=self.course.dtype, device=indices.device)


class PassedOver(StandIn):
    """For a module before the first block that is no embedding: what it takes is as good as what it would return."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return stream_of(self.name, args, kwargs)


class NotReached(StandIn):
    """For a module after the last block."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"'{self.name}' is on the last stage of the pipeline, and was called on another one")


@dataclass
class Seat:
    """A place in the model where a module of this rank or a stand-in sits, as the stage that runs asks for."""

    parents: list[tuple[nn.Module, str]]
    own: nn.Module
    stand_in: nn.Module
    of_stage: int
    now: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.own

    def take(self, module: nn.Module) -> None:
        if module is not self.now:
            self.now = module
            for parent, name in self.parents:
                parent._modules[name] = module


def in_form(stream: Tensor, length_of_output: int | None) -> Any:
    """As a block would return it: itself, or in front of a tuple of that length."""
    return stream if length_of_output is None else (stream, *[None] * (length_of_output - 1))


def show_plain_attributes(original: nn.Module, stand_in: nn.Module) -> None:
    """What a model asks its blocks for: layer_idx, attention_type."""
    for attribute, value in vars(original).items():
        if isinstance(value, (str, int, float, bool)) and not hasattr(stand_in, attribute):
            setattr(stand_in, attribute, value)


def stream_of(name: str, args: Any, kwargs: Any) -> Tensor:
    """The tensor that goes from block to block: a block's first argument, or `hidden_states`."""
    candidates = [*args[:1], kwargs.get("hidden_states"), *kwargs.values()]
    found = next((value for value in candidates if isinstance(value, Tensor)), None)
    if found is None:
        raise TypeError(f"'{name}' was called without a tensor, so there is nothing to send from stage to stage")
    return found
