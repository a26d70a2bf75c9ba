"""The built-in GPT: causal, sized as told, and able to learn."""

import math

import pytest
import torch

from zerofold.train.gpt import GPT, Block, GPTConfig, generate

TINY = GPTConfig(layers=2, hidden=32, heads=2, seq=16)


def test_loss_starts_at_that_of_a_blind_guess() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (4, 16))
    assert GPT(TINY)(tokens, tokens).item() == pytest.approx(math.log(256), abs=0.1)


def test_a_byte_does_not_see_what_follows_it() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 0
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.allclose(before[:10], after[:10], atol=1e-6)
    assert not torch.allclose(before[10:], after[10:], atol=1e-6)


def test_the_order_of_bytes_matters() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    there, back = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[3, 1, 2, 4]])
    assert not torch.allclose(model(there)[0, -1], model(back)[0, -1], atol=1e-6)


def test_the_repeated_unit_holds_nearly_all_parameters() -> None:
    model = GPT(GPTConfig())
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    assert len(blocks) == GPTConfig.layers
    inside = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    assert inside > 0.9 * sum(parameter.numel() for parameter in model.parameters())


def test_it_learns() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(17).repeat(4, 1)
    for _ in range(30):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.5


def test_generated_text_depends_on_the_seed_alone_and_may_pass_the_window() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)

    def write(seed: int) -> bytes:
        return generate(model, b"def ", 24, seq=16, seed=seed, device=torch.device("cpu"))

    assert len(write(0)) == 28
    assert write(0).startswith(b"def ")
    assert write(0) == write(0) != write(1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 100, "heads": 6}, "use hidden 96"),
        ({"hidden": 4, "heads": 6}, "use hidden 12"),
        ({"layers": 0}, "layers is 0: give at least 1"),
        ({"seq": -1}, "seq is -1"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_fix(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**sizes)
