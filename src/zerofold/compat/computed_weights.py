"""state_dict() of an engine's model where every rank has whole parameters: those, as in DeepSpeed, in any precision.

zerofold shows the masters, of which a rank has its piece. Scripts for DeepSpeed write `engine.module.state_dict()` by
one rank alone at stages 1 and 2, and so do Accelerate and the Trainer.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zerofold.engine import Engine
from zerofold.sharded import ShardedTensor


def show_computed_weights(model: nn.Module) -> None:
    """From here on, until the model is closed.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(4, 2), stage=2, precision="bf16")
    >>> show_computed_weights(model)
    >>> {name: value.dtype for name, value in model.state_dict().items()}
    {'weight': torch.bfloat16, 'bias': torch.bfloat16}
    >>> zf.close(model)
    """
    engine = Engine.of(model)
    if engine.row.parameters.is_cut:
        return

    def after_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, value in state.items():
            if isinstance(value, ShardedTensor):
                parameter = module.get_parameter(name.removeprefix(prefix))
                # Reading waits for what other ranks have sent of the last step; it asks them for nothing.
                state[name] = parameter if isinstance(value, nn.Parameter) else parameter.detach()

    engine.on_close.append(model.register_state_dict_post_hook(after_state_dict).remove)
