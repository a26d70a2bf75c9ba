"""What a Hugging Face model is fed so that it returns a loss: by its class's own words (`main_input_name` and the
signature of its forward) and the numbers of its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]
Example = Callable[[int], Inputs]
"""The keyword arguments of a forward of so many samples that returns a loss, on the meta device."""

_LONGEST = 2048
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
_IMAGE = 224  # of a network of convolutions alone, which takes any
_ONE_LABEL = ("ForImageClassification", "ForSequenceClassification", "ForAudioClassification")


class UnknownInputsError(ValueError):
    """What this model takes is not known here."""


def example_for(model: nn.Module, seq: int | None = None) -> tuple[Example, int]:
    """The example, and the tokens, patches or frames of a sample.

    >>> from transformers import ViTConfig, ViTForImageClassification
    >>> with torch.device("meta"):
    ...     model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_hidden_layers=1))
    >>> example, tokens = example_for(model)
    >>> {name: tuple(tensor.shape) for name, tensor in example(3).items()}, tokens
    ({'pixel_values': (3, 3, 32, 32), 'labels': (3,)}, 17)
    """
    config: Any = model.config
    taken = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    text = getattr(config, "text_config", None)
    if main == "pixel_values" and text is None:
        shapes, tokens = _image(config)
    elif main == "input_features" and hasattr(config, "max_source_positions") and "decoder_input_ids" in taken:
        tokens = _length(model, config, seq)
        shapes = {main: (config.num_mel_bins, 2 * config.max_source_positions), "decoder_input_ids": (tokens,)}
    elif main == "input_values" and hasattr(config, "conv_stride"):
        tokens = seq or _LONGEST
        shapes = {main: (_samples(config, tokens),)}
        config.apply_spec_augment = False  # it hides frames that are drawn on the host, and takes no memory
    elif "return_loss" in taken and text is not None and getattr(config, "vision_config", None) is not None:
        images, _ = _image(config.vision_config)
        tokens = _length(model, text, seq)
        shapes = {"input_ids": (tokens,), **images}
    elif main == "input_ids" and getattr(config, "vocab_size", None) and not hasattr(config, "vision_config"):
        tokens = _length(model, config, seq)
        shapes = {main: (tokens,)}
        if getattr(config, "is_encoder_decoder", False):
            shapes["decoder_input_ids"] = (tokens,)  # else made from the labels, by a token that not every config names
    else:
        raise UnknownInputsError(
            f"model_type {config.model_type!r} takes inputs that are not known here; give it as --function "
            "module:function, which returns the model and a function from a batch size to the inputs of a forward, or "
            "the model alone for a plan of its states"
        )
    has_labels = "labels" in taken and not type(model).__name__.endswith("ForCTC")  # which reads their lengths
    if has_labels:
        shapes["labels"] = () if type(model).__name__.endswith(_ONE_LABEL) else (tokens,)

    def example(batch: int) -> Inputs:
        made: Inputs = {}
        for name, shape in shapes.items():
            is_number = name in ("pixel_values", "input_values", "input_features")
            kind = torch.float32 if is_number else torch.long
            made[name] = torch.empty(batch, *shape, dtype=kind, device="meta")
        return made | ({"return_loss": True} if "return_loss" in taken else {})

    return example, tokens


def _image(config: Any) -> tuple[dict[str, tuple[int, ...]], int]:
    size, patch = getattr(config, "image_size", None) or _IMAGE, getattr(config, "patch_size", None) or 16
    height, width = (size, size) if isinstance(size, int) else size
    down, across = (patch, patch) if isinstance(patch, int) else patch
    return {"pixel_values": (config.num_channels, height, width)}, (height // down) * (width // across) + 1


def _samples(config: Any, frames: int) -> int:
    """Of sound, out of which convolutions make so many frames."""
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        frames = (frames - 1) * stride + kernel
    return frames


def _length(model: nn.Module, config: Any, seq: int | None) -> int:
    known = [getattr(config, name, None) for name in _LIMITS]
    longest = next((number for number in known if number and number > 0), None)  # XLNet says -1: no end
    if longest and longest != config.vocab_size:
        # RoBERTa's positions begin behind that of padding, which its config counts among them.
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        skipped = (each.padding_idx for each in tables if each.num_embeddings == longest)
        longest -= next((index + 1 for index in skipped if index is not None), 0)
    if seq is not None and longest and seq > longest:
        raise ValueError(f"--seq {seq} is longer than the {longest} positions of model_type {config.model_type!r}")
    return seq or min(_LONGEST, longest or _LONGEST)
