"""What the plan knows of a model that is given as a Hugging Face config or as Python code; no weights are read.

The model is built on the meta device, where a tensor has a shape and no memory, and traced there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerofold.activation.chains import NO_BLOCKS, NO_CHAIN
from zerofold.plan.comparison import Parameter, shape_of
from zerofold.plan.examples import Example, UnknownInputsError, example_for
from zerofold.plan.shape import ModelShape
from zerofold.plan.tracing import trace
from zerofold.plan.users import call_of, find_function
from zerofold.units import assign, find_units

_WANTED = (
    "return the model, or the model and its example: a function of the batch size that returns forward's arguments by "
    'name, such as lambda batch: {"tokens": torch.zeros(batch, 128, dtype=torch.long)}'
)
_HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageClassification",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCTC",
)
_WITH_ENCODER = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
"""Where decoders are causal language models too, and are not what is meant."""

_SKIPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")

_NO_CHECKPOINTS = {
    NO_BLOCKS: "no repeated blocks were found in this model, so none is computed again in backward; give "
    "checkpoint_every=0",
    NO_CHAIN: "the blocks of this model do not simply follow each other, so several cannot be computed again together; "
    "give checkpoint_every=1",
}


class Traced(NamedTuple):
    """A model on the meta device, what it is fed, and how many tokens or patches a sample has."""

    model: nn.Module
    example: Example | None
    tokens: int
    is_guessed: bool = False
    """The example was made here, for a model that a function returned alone."""


def from_hugging_face(
    where: str | Path, *, seq: int | None = None, precision: str = "bf16", checkpoint_every: Sequence[int] = (0, 1)
) -> ModelShape:
    """From a folder with a config.json, or that file."""
    with _quiet():
        built = build_hugging_face(where, seq)
        shape = _shape(built, str(where), "config", precision, checkpoint_every)
    return _with_numbers(shape, built.model)


@contextmanager
def _quiet() -> Iterator[None]:
    """Advice on caches and losses is not for who only asks what a model takes."""
    try:
        from transformers.utils import logging
    except ImportError:  # which is said where it is needed
        yield
        return
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def build_hugging_face(where: str | Path, seq: int | None = None) -> Traced:
    file = Path(where)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"--model {where}: there is no config.json; give a Hugging Face folder or its config.json")
    config = read_config(file)
    try:
        return build(config, seq)
    except Exception as error:  # numbers that no model can have
        raise ValueError(f"--model {file}: {in_a_line(error)}") from error


def read_config(file: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"--model {file} needs Hugging Face's classes; `pip install transformers`, or use --layers, --hidden, …"
        ) from None
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"--model {file} is no config.json: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--model {file} is no config.json: it has a {type(found).__name__} where an object should be")
    model_type = found.get("model_type")
    if not model_type:
        raise ValueError(f"--model {file} has no model_type, so it is no config of a Hugging Face model")
    try:
        return transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except Exception as error:  # its keys are checked by many hands: by classes, validators, the hub's own errors
        raise ValueError(f"--model {file}: model_type {model_type!r} cannot be built: {in_a_line(error)}") from None


def build(config: Any, seq: int | None = None) -> Traced:
    """The model of a config with its head, on the meta device."""
    with torch.device("meta"):
        model = with_head(config).train()
    example, tokens = example_for(model, seq)
    return Traced(model, example, tokens)


def with_head(config: Any) -> nn.Module:
    """With its head: the class that the config names, or the first of the usual ones that knows it."""
    import transformers

    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    make: Callable[[Any], nn.Module] | None = next((each for each in named if each is not None), None)
    if make is None:
        names = (*(_WITH_ENCODER if getattr(config, "is_encoder_decoder", False) else ()), *_HEADS)
        autos = [getattr(transformers, name) for name in names]
        auto = next((each for each in autos if type(config) in each._model_mapping), None)
        make = None if auto is None else auto.from_config
    if make is None:
        raise ValueError(
            f"model_type {config.model_type!r} has no class with a loss that is known here; give it as "
            "--function module:function"
        )
    for name in _SKIPS:  # whole blocks at random, now these and now those: the most is when none is
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    return make(config)


def from_function(
    name: str, *, seq: int | None = None, precision: str = "bf16", checkpoint_every: Sequence[int] = (0, 1)
) -> ModelShape:
    """From `module:function`, which returns a model, or a model and its example: a function from a number of samples to
    the keyword arguments of a forward that returns a loss. It is called with the meta device as default."""
    with _quiet():
        built = build_function(name, seq)
        shape = _shape(built, name, "function", precision, checkpoint_every)
    return _with_numbers(shape, built.model)


def build_function(name: str, seq: int | None = None) -> Traced:
    make = find_function("--function", name)
    with torch.device("meta"):
        found = make()
    model, example = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"--function {name} returned a {type(model).__name__}; {_WANTED}")
    if example is not None and not callable(example):
        raise ValueError(f"--function {name}: the example is a {type(example).__name__}; {_WANTED}")
    if example is None:
        with suppress(UnknownInputsError):  # its states are planned all the same
            if hasattr(getattr(model, "config", None), "model_type"):
                return Traced(model, *example_for(model, seq), is_guessed=True)
        return Traced(model, None, seq or 1)
    example = call_of("--function", name, example, "the example")
    inputs = example(1)
    if not isinstance(inputs, dict):
        raise ValueError(f"--function {name}: the example returned a {type(inputs).__name__}; {_WANTED}")
    if seq is not None:
        raise ValueError(
            f"--seq {seq}: --function {name} returned an example, whose samples have their own length; leave it out"
        )
    sizes = [tensor.shape[1] for tensor in inputs.values() if isinstance(tensor, Tensor) and tensor.dim() == 2]
    return Traced(model, example, max(sizes, default=1))


def _shape(built: Traced, name: str, source: str, precision: str, checkpoint_every: Sequence[int]) -> ModelShape:
    if built.example is None:
        return _states_alone(built, name, source, "no example of its inputs was given")
    intervals = sorted({0, *checkpoint_every})
    try:
        found = trace(built.model, built.example(2), checkpoint_every=intervals, precision=precision, name=name)
    except Exception as error:  # whatever the model's own code raises
        if str(error) in _NO_CHECKPOINTS:
            option = "--function" if source == "function" else "--model"
            raise ValueError(f"{option} {name}: {_NO_CHECKPOINTS[str(error)]}") from error
        said = f"{type(error).__name__}: {in_a_line(error)}"
        if built.is_guessed:
            return _states_alone(built, name, source, f"its forward cannot be traced ({said})")
        alone = "--function module:function that returns the model alone plans its states"
        raise ValueError(f"{name} cannot be traced on the meta device: {said}; {alone}") from error
    return replace(found, source=source, tokens=built.tokens)


def _states_alone(built: Traced, name: str, source: str, why: str) -> ModelShape:
    note = (
        f"{why}, so activations are not counted, and times are a guess: arithmetic by the number of parameters, "
        f"{built.tokens} token{'s' * (built.tokens > 1)} a sample"
    )
    return replace(shape_of_model(built.model, name), source=source, tokens=built.tokens, notes=(note,))


def in_a_line(error: Exception) -> str:
    """
    >>> in_a_line(ValueError("no such key: x\\nhints follow")), in_a_line(ValueError("by a validator:\\n  2 is odd"))
    ('no such key: x', 'by a validator: 2 is odd')
    >>> in_a_line(AssertionError())
    'AssertionError'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def shape_of_model(model: nn.Module, name: str) -> ModelShape:
    """Parameters alone, by the units that the engine would find."""
    assigned = assign(model, find_units(model, None))
    parameters = {
        unit: [Parameter(entry.parameter.numel(), entry.parameter.requires_grad) for entry in entries]
        for unit, entries in assigned.items()
    }
    sizes = [parameter.element_size() for parameter in model.parameters()]
    return shape_of(parameters, name=name, built_bytes=max(sizes, default=4))


def _with_numbers(shape: ModelShape, model: nn.Module) -> ModelShape:
    """Layers, hidden width and so on, where the model's config tells them."""
    config = getattr(model, "config", None)

    def number(*names: str) -> int | None:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int)), None)

    return replace(
        shape,
        layers=number("num_hidden_layers", "n_layer", "num_layers"),
        hidden=number("hidden_size", "n_embd", "d_model"),
        heads=number("num_attention_heads", "n_head", "num_heads"),
        vocab=number("vocab_size"),
    )
