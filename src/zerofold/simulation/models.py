"""Which model is simulated: a GPT by its sizes, a Hugging Face config, or what a function of yours builds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerofold.bench.gpt import GPT, Block, GPTSize
from zerofold.plan.examples import example_for
from zerofold.plan.sources import in_a_line, read_config, with_head
from zerofold.plan.tracing.recording import Recording
from zerofold.plan.tracing.running import start_of_backward
from zerofold.plan.users import find_function
from zerofold.simulation.engines import Loss
from zerofold.units import UnitChoice


@dataclass(frozen=True, kw_only=True)
class Model:
    """How to build it, and its loss for a batch of so many samples."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[int], Loss]
    units: UnitChoice = None


def gpt(size: GPTSize, *, checkpointing: bool) -> Model:
    """The GPT of the benches.

    >>> gpt(GPTSize(), checkpointing=True).name
    'GPT 8x512'
    """

    def loss(batch: int) -> Loss:
        return lambda model, device: model(*_tokens(batch, size.seq, size.vocab, device))

    def build() -> nn.Module:
        return GPT(size, checkpointing=checkpointing)

    return Model(name=f"GPT {size.layers}x{size.width}", build=build, loss=loss, units=Block)


def from_config(path: Path, *, seq: int, checkpointing: bool) -> Model:
    """The model of a Hugging Face folder's config.json, with its head, and fed as `zerofold plan` does."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--model {path}: there is no {file}; give a folder with a config.json, or module:function")
    config = read_config(file)

    def build() -> nn.Module:
        try:
            model: Any = with_head(config).float()
            example_for(model, seq)  # what nobody knows how to feed is said here
        except Exception as error:  # numbers that no model can have
            raise ValueError(f"--model {file}: {in_a_line(error)}") from error
        model.config.use_cache = False
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train()

    def loss(batch: int) -> Loss:
        def run(model: nn.Module, device: torch.device) -> Tensor:
            example, _ = example_for(model, seq)
            inputs = {name: _filled(value, config, device) for name, value in example(batch).items()}
            return start_of_backward(model(**inputs), None, Recording(batch))

        return run

    return Model(name=config.model_type, build=build, loss=loss)


def _filled(value: Any, config: Any, device: torch.device) -> Any:
    """Random tokens, of which a label is one too; random pixels and sound."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, device=device)
    known = config.num_labels if value.dim() == 1 else config.get_text_config().vocab_size
    return torch.randint(0, known, value.shape, device=device)


def from_function(name: str, *, seq: int, vocab: int) -> Model:
    """What `module:function` returns is called with tokens and targets and gives a loss, or something that has one."""
    function = find_function("--model", name)

    def build() -> nn.Module:
        found = function()
        model = found[0] if isinstance(found, tuple) and found else found  # with an example, as for `zerofold plan`
        if not isinstance(model, nn.Module):
            raise ValueError(f"--model {name} returned a {type(model).__name__}; return a torch module")
        try:
            inspect.signature(model.forward).bind(None, None)
        except TypeError:
            takes = inspect.signature(model.forward)
            raise ValueError(
                f"--model {name}: its forward takes {takes}, and is called with tokens and targets, both [batch, seq]; "
                "let it take these and return a loss"
            ) from None
        return model

    def loss(batch: int) -> Loss:
        def run(model: nn.Module, device: torch.device) -> Tensor:
            found = model(*_tokens(batch, seq, vocab, device))
            result: Tensor = getattr(found, "loss", found)
            if not isinstance(result, Tensor) or result.numel() != 1:
                what = (
                    f"numbers of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
                )
                raise ValueError(f"--model {name}: its forward returned {what}; return a loss, or what has a loss")
            return result

        return run

    return Model(name=name, build=build, loss=loss)


def choose(name: str | None, size: GPTSize, *, checkpointing: bool) -> Model:
    """By what `--model` says; without it, the GPT of the given sizes."""
    if name is None:
        return gpt(size, checkpointing=checkpointing)
    if ":" in name and not Path(name).exists():
        if checkpointing:
            raise ValueError(f"--model {name}: --checkpointing is not ours to switch on there; let the function do it")
        return from_function(name, seq=size.seq, vocab=size.vocab)
    return from_config(Path(name), seq=size.seq, checkpointing=checkpointing)


def _tokens(batch: int, seq: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, vocab, (batch, seq + 1), device=device)
    return tokens[:, :-1], tokens[:, 1:]
