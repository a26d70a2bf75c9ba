"""What a step of the built-in job has to compute, and what a plan must know of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from zerofold.observe.predicted import Workload
from zerofold.plan.tracing.trace import trace
from zerofold.train.gpt import GPT, Block, GPTConfig
from zerofold.train.options import TrainOptions


def workload(options: TrainOptions, micro_batch: int, keep: str | None = None) -> Workload:
    """For predictions of a GPU's peak memory and time: activations follow from a trace without memory. `keep`: where
    inputs of checkpointed blocks wait, where that was chosen in the run."""
    with torch.device("meta"):
        model = GPT(options.gpt)
        tokens = torch.zeros(1, options.gpt.seq, dtype=torch.long)
    every = options.checkpoint_every
    shape = trace(model, (tokens, tokens), units=Block, checkpoint_every=[every], precision=options.precision)
    shape = replace(shape, hidden=options.gpt.hidden, heads=options.gpt.heads)  # which a trace does not tell
    return Workload(shape=shape, micro_batch=micro_batch, checkpoint_every=every, checkpoints_on=keep or options.keep)


def flops_per_token(gpt: GPTConfig, parameters: int) -> int:
    """Of forward and backward: 6 for every weight that a token is multiplied with, and attention over all positions."""
    multiplied = parameters - gpt.vocab * gpt.hidden  # the embedding is looked up
    return 6 * multiplied + 12 * gpt.layers * gpt.hidden * gpt.seq
