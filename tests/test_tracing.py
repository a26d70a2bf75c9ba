"""The trace of a model without memory against what the same model really takes, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import zoo
from measured import peak_of_step
from zerofold.bench.gpt import GPT, GPTSize
from zerofold.plan.shape import Activity, Phase
from zerofold.plan.tracing import trace
from zerofold.plan.tracing.answers import Answers

SIZE = GPTSize(vocab=512, width=128, layers=4, heads=4, seq=64)
TOLERANCE = 0.02
TOKENS = (torch.zeros(1, SIZE.seq, dtype=torch.int64),) * 2


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """A thread has memory of its own in the CPU's attention."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def peak(activity: Activity, samples: int) -> float:
    return max(moment.alive.at(samples) + (moment.gradients or 0) + moment.sent for moment in activity.moments)


def gpt_batch(samples: int) -> Callable[[], Any]:
    return lambda: tuple(torch.randint(0, SIZE.vocab, (samples, SIZE.seq)) for _ in range(2))


def zoo_batch(model: zoo.Model, samples: int) -> Callable[[], Any]:
    def make() -> dict[str, Tensor]:
        one = model.batch(torch.Generator().manual_seed(0))
        return {
            name: tensor.repeat(samples, *[1] * (tensor.dim() - 1))[:samples].clone() for name, tensor in one.items()
        }

    return make


@pytest.mark.parametrize("interval", [0, 1])
def test_a_gpt_takes_what_was_traced(interval: int) -> None:
    with torch.device("meta"):
        shape = trace(GPT(SIZE), TOKENS, device_like="cpu", precision="fp32")
    model = GPT(SIZE, checkpointing=bool(interval))
    for samples in (1, 4):
        real = peak_of_step(model, gpt_batch(samples))
        assert peak(shape.activity(interval), samples) == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "t5", "vit", "mixtral", "whisper"])
def test_other_models_take_what_was_traced(name: str) -> None:
    entry = zoo.ZOO[name]
    model = zoo.build(entry)
    shape = trace(model, entry.batch(torch.Generator()), device_like="cpu", precision="fp32")
    for interval in (0, 1):
        if interval:  # without states of random numbers, which are kept in host memory: here that is the device's
            options = {"use_reentrant": False, "preserve_rng_state": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
        for samples in (2, 5):
            real = peak_of_step(model, zoo_batch(entry, samples))
            assert peak(shape.activity(interval), samples) == pytest.approx(real, rel=TOLERANCE), (interval, samples)


@pytest.mark.parametrize("name", ["llama", "t5", "mixtral"])
def test_what_is_remembered_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = zoo.ZOO[name]
    with torch.device("meta"):
        model, example = zoo.build(entry), entry.batch(torch.Generator())
    kept = trace(model, example)
    monkeypatch.setattr(Answers, "find", lambda self, key: None)
    assert trace(model, example) == kept


@pytest.mark.parametrize(
    ("call", "is_kept"),
    [
        (lambda x: torch.ops.aten.add.Tensor(x, x), True),
        (lambda x: torch.ops.aten._unsafe_view.default(x, [6]), False),  # shares memory, and its schema says nothing
        (lambda x: torch.ops.aten.view.default(x, [6]), False),
        (lambda x: torch.ops.aten.add_.Tensor(x, x), False),
    ],
    ids=["add", "unsafe view", "view", "in place"],
)
def test_only_new_tensors_are_remembered(call: Callable[[Tensor], Tensor], is_kept: bool) -> None:
    answers, ones, seen = Answers(), torch.ones(2, 3, device="meta"), []

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            key = answers.key(func, args, kwargs or {})
            found = func(*args, **(kwargs or {}))
            answers.keep(key, [arg for arg in args if isinstance(arg, Tensor)], found, None)
            seen.append(answers.find(key) is not None)
            return found

    with Asks():
        call(ones)
    assert seen == [is_kept]


def test_equal_numbers_of_other_types_are_other_questions() -> None:
    x, add = torch.ones(2, dtype=torch.int64, device="meta"), torch.ops.aten.add.Scalar
    keys = {Answers().key(add, (x, value), {}) for value in (1, 1.0, True)}
    assert len(keys) == 3


def test_a_model_that_checkpoints_by_itself_is_followed() -> None:
    own = trace(GPT(SIZE, checkpointing=True), TOKENS)
    ours = trace(GPT(SIZE), TOKENS, checkpoint_every=[1])
    assert [activity.checkpoint_every for activity in own.activities] == [1]
    assert peak(own.activity(1), 4) == peak(ours.activity(1), 4)
    assert "by itself" in own.notes[0]
    with pytest.raises(ValueError, match="checkpoint_every=0; known: 1"):
        own.activity(0)


def test_fewer_inputs_are_kept_the_more_blocks_share_one() -> None:
    shape = trace(GPT(SIZE), TOKENS, checkpoint_every=(0, 1, 2, 4))
    one_input = SIZE.seq * SIZE.width * 2
    assert [activity.checkpoints.each for activity in shape.activities] == [0, 4 * one_input, 2 * one_input, one_input]
    work = [sum(moment.repeats * moment.work.flops.each for moment in each.moments) for each in shape.activities]
    assert work[0] < work[1] < work[2] < work[3]  # torch leaves out what is behind the last tensor that is needed


def test_arithmetic_is_what_torch_counts() -> None:
    counter = FlopCounterMode(display=False)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
    with counter:
        model(torch.randn(5, 7, 64)).sum().backward()
    shape = trace(model, torch.randn(1, 7, 64), checkpoint_every=[0])
    found = sum(moment.repeats * moment.work.flops.at(5) for moment in shape.activity(0).moments)
    assert found == counter.get_total_flops()
    assert "stands for it" in shape.notes[0]


class Scaled(nn.Module):
    """Its tokens times a number each, or times as many numbers as they have; one or both of them turned."""

    def __init__(self, width: int, turned: str = "") -> None:
        super().__init__()
        self.layer, self._width, self._turned = nn.Linear(32, 32, bias=False), width, turned

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        numbers = x.new_ones(*x.shape[:2], self._width)
        if self._turned:
            x = x.transpose(1, 2)
        if self._turned == "both":
            numbers = numbers.transpose(1, 2)
        return (x * numbers).sum()


def test_a_gpu_takes_longer_for_numbers_that_are_not_in_a_row() -> None:
    def moved(model: nn.Module, device: str) -> float:
        shape = trace(model, torch.ones(1, 32, 32), precision="fp32", device_like=device, checkpoint_every=[0])
        moments = [moment for moment in shape.activity(0).moments if moment.phase is Phase.FORWARD]
        return sum(moment.repeats * moment.work.moved.at(4) for moment in moments)

    one_row = moved(Scaled(32), "cuda")
    assert moved(Scaled(32), "cpu") == moved(Scaled(32, "one"), "cpu") == moved(Scaled(32, "both"), "cuda") == one_row
    assert moved(Scaled(32, "one"), "cuda") > 1.3 * one_row
    # A number for each token is hardly anything to read, and yet slows the product.
    assert moved(Scaled(1), "cuda") > 1.3 * moved(Scaled(1), "cpu")


def test_a_loss_in_tiles_takes_as_much_as_its_largest_tile() -> None:
    """Of which a larger batch takes more, one after the other."""
    size = GPTSize(vocab=4096, width=16, layers=2, heads=2, seq=64)
    shape = trace(GPT(size, loss_tokens=64), TOKENS, precision="fp32", checkpoint_every=[1])
    tile = 64 * size.vocab * 4
    alive = max(moment.alive.at(8) for moment in shape.activity(1).moments)
    assert tile <= alive <= 5 * tile  # the whole logits of 8 samples would be 8 tiles, three times


def test_equal_blocks_are_told_once() -> None:
    shape = trace(GPT(SIZE), TOKENS, checkpoint_every=[0])
    assert [(unit.name, unit.count) for unit in shape.units] == [("", 1), ("blocks.0", 4)]
    assert shape.parameters == SIZE.parameters
    forward = [moment for moment in shape.activity(0).moments if moment.phase is Phase.FORWARD and moment.unit == 1]
    assert [moment.repeats for moment in forward] == [4]
    deeper = trace(GPT(GPTSize(vocab=512, width=128, layers=7, heads=4, seq=64)), TOKENS, checkpoint_every=[0])
    more = [moment for moment in deeper.activity(0).moments if moment.phase is Phase.FORWARD and moment.unit == 1]
    assert more[0].alive.at(3) == forward[0].alive.at(3) + 3 * forward[0].growth.at(3)


class Attending(nn.Module):
    """Blocks with attention over heads of 64."""

    def __init__(self, masked: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.masked, self.dropout = masked, dropout

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, 64]
        for block in self.blocks:
            heads = block(x).unsqueeze(1)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device) if self.masked else None
            x = F.scaled_dot_product_attention(heads, heads, heads, mask, is_causal=not self.masked).squeeze(1)
            x = F.dropout(x, self.dropout)
        return x.sum()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_fused_attention_keeps_no_scores_on_cuda(masked: bool, precision: str) -> None:
    def kept(length: int) -> float:
        shape = trace(Attending(masked), torch.ones(1, length, 64), precision=precision, checkpoint_every=[0])
        return max(moment.alive.each for moment in shape.activity(0).moments)

    assert kept(2048) == pytest.approx(2 * kept(1024), rel=0.01)  # the scores of one sample would be four times


class OneHeadOfKeys(nn.Module):
    """All heads of queries share one of keys, which no fused kernel does unless it is told."""

    def __init__(self, is_told: bool) -> None:
        super().__init__()
        self.layer, self.is_told = nn.Linear(64, 64), is_told

    def forward(self, x: Tensor) -> Tensor:
        queries = self.layer(x).unflatten(2, (4, 16)).transpose(1, 2)
        keys = queries[:, :1]
        return F.scaled_dot_product_attention(queries, keys, keys, is_causal=True, enable_gqa=self.is_told).sum()


def test_one_head_of_keys_for_all_keeps_scores_unless_it_is_told() -> None:
    inputs = torch.ones(2, 128, 64)
    shape = trace(OneHeadOfKeys(False), inputs, device_like="cpu", precision="fp32", checkpoint_every=[0])
    real = peak_of_step(OneHeadOfKeys(False), lambda: (inputs.clone(),))
    assert peak(shape.activity(0), 2) == pytest.approx(real, rel=TOLERANCE)

    def kept(length: int, is_told: bool) -> float:
        shape = trace(OneHeadOfKeys(is_told), torch.ones(1, length, 64), checkpoint_every=[0])
        return max(moment.alive.each for moment in shape.activity(0).moments)

    for is_told, times in ((False, 4), (True, 2)):
        assert kept(4096, is_told) / kept(2048, is_told) == pytest.approx(times, rel=0.1)


def test_dropout_keeps_one_byte_an_element_on_cuda() -> None:
    def kept(dropout: float) -> float:
        shape = trace(Attending(dropout=dropout), torch.ones(1, 1024, 64), checkpoint_every=[0])
        return next(m.growth.each for m in shape.activity(0).moments if m.phase is Phase.FORWARD and m.unit == 1)

    # Attention keeps its own output, and the next block what comes out of the dropout: two bytes an element.
    assert kept(0.1) - kept(0.0) == pytest.approx((1 + 2) * 1024 * 64, rel=0.01)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * x.sum().item()


def test_a_value_that_is_read_is_named_with_its_line() -> None:
    with pytest.raises(ValueError, match=r"test_tracing\.py:\d+ `return self.layer\(x\) \* x.sum\(\).item\(\)` reads"):
        trace(Reading(), torch.ones(1, 4))


def test_what_cannot_be_traced_says_so() -> None:
    with pytest.raises(ValueError, match="device_like='tpu' is not known; choose cuda or cpu"):
        trace(Reading(), torch.ones(1, 4), device_like="tpu")
    with pytest.raises(ValueError, match="no tensor in it"):
        trace(Reading(), {})
    with pytest.raises(ValueError, match="depends on a trained parameter"):
        trace(Reading().requires_grad_(False).layer, torch.ones(1, 4))


def test_the_model_is_left_as_it_was() -> None:
    model = GPT(SIZE)
    before = {name: (parameter.data_ptr(), parameter.dtype) for name, parameter in model.named_parameters()}
    trace(model, TOKENS)
    assert {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()} == before
    assert all(parameter.grad is None and not parameter._backward_hooks for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
