"""A model whose masters are elsewhere: what its modules see, what is whole, frozen, averaged, alone or recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import batches, largest_difference, make_model
from tests.test_precision import BF16, FP32, adamw, settings_of, sgd
from torch import Tensor, nn
from torch.nn import functional as F

import zerofold as zf


class TwoParts(nn.Module):
    """A norm, a buffer and an auxiliary loss left on a module."""

    rotation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("rotation", torch.linspace(0, 1, 8))
        self.seen: dict[str, torch.dtype] = {}
        self.norm.register_forward_hook(lambda module, args, output: self._see(args[0], module.weight, output))

    def _see(self, given: Tensor, weight: Tensor, output: Tensor) -> None:
        self.seen |= {"norm input": given.dtype, "norm weight": weight.dtype}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(x)
        self.seen |= {"input": x.dtype, "layer": hidden.dtype, "buffer": self.rotation.dtype}
        hidden = self.norm(hidden)
        self.seen["after norm"] = hidden.dtype
        self.layer.auxiliary = hidden.pow(2).mean()
        logits = self.head(hidden)
        return {"loss": logits.float().pow(2).mean(), "logits": logits, "hidden": hidden}


def dtypes_seen(stage: int, keep: Any, buffers: Any) -> tuple[dict[str, Any], Any, Any]:
    policy = zf.Precision(parameters=BF16, keep=keep, buffers=buffers)
    model = zf.shard(TwoParts(), stage=stage, precision=policy)
    out = model(torch.randn(2, 8))
    out["loss"].backward()
    gradient = zf.full_grad(model.norm.weight)
    seen = dict(model.seen)
    with zf.full_params(model):
        shown = model.layer.weight.dtype
    zf.close(model)
    assert gradient is not None
    return {**seen, "logits": out["logits"].dtype}, shown, gradient.dtype


def named_norm(name: str, it: Any) -> bool:
    return name == "norm"


@pytest.mark.parametrize(
    ("stage", "keep"), [(0, [nn.LayerNorm]), (1, [nn.LayerNorm]), (3, [nn.LayerNorm]), (3, ["nor?"]), (3, [named_norm])]
)
def test_modules_kept_in_fp32(ranks: Any, stage: int, keep: Any) -> None:
    for seen, shown, gradient in ranks(2, dtypes_seen, stage, keep, None):
        assert seen == {
            "input": BF16,
            "layer": BF16,
            "buffer": FP32,  # nobody asked
            "norm input": FP32,
            "norm weight": FP32,
            "after norm": BF16,
            "logits": BF16,
        }
        assert shown is gradient is FP32


def test_buffers_are_cast_when_asked(ranks: Any) -> None:
    ((seen, _, _),) = ranks(1, dtypes_seen, 2, [], BF16)
    assert seen["buffer"] is seen["norm weight"] is BF16


def changes_to_masters(stage: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = make_model()
    model, optimizer = zf.prepare(model, adamw(model.parameters()), stage=stage, precision="bf16")
    (batch,) = batches(1)
    model(*batch).backward()
    optimizer.step()
    before = zf.full(model.head.weight)
    third = 1 / 3  # not a bf16 number
    with zf.full_params(model), torch.no_grad():
        model.head.weight[0] = third
        found["loss inside"] = model(*batch).dtype
        found["untouched"] = torch.equal(model.head.weight[1:], before[1:])
    with zf.full_params(model):
        found["exact"] = bool((model.head.weight[0] == third).all())
    with zf.full_params(model, masters=False):
        found["compute"] = model.head.weight.dtype
        found["rounded"] = bool((model.head.weight[0] == torch.tensor(third).to(BF16)).all())
        found["loss"] = model(*batch).dtype
    try:
        with zf.full_params(model, masters=False), torch.no_grad():
            model.head.weight[0] = 1.0
    except RuntimeError as error:
        found["refused"] = str(error)
    zf.close(model)
    found["closed"] = model.head.weight.dtype, bool((model.head.weight[0] == third).all())
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_parameters_are_the_masters(ranks: Any, stage: int) -> None:
    for found in ranks(2, changes_to_masters, stage):
        assert found.pop("untouched")
        assert "16-bit" in found.pop("refused")
        assert found == {
            "loss inside": FP32,
            "exact": True,
            "compute": BF16,
            "rounded": True,
            "loss": BF16,
            "closed": (FP32, True),
        }


def frozen_and_thawed(stage: int) -> dict[str, Any]:
    """A frozen half has no master; thawed, it gets one and trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].requires_grad_(False)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, precision="bf16")
    frozen = zf.ledger(model).snapshot()["state_bytes"]["optimizer"]
    model[0].requires_grad_(True)
    for _ in range(2):
        model(torch.ones(2, 16)).float().pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {"frozen masters": frozen, "states": len(optimizer.state), "masters": zf.full(model[0].weight).dtype}
    zf.close(model)
    return {**found, "closed": model[0].weight.dtype}


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_have_no_master_until_they_thaw(ranks: Any, stage: int) -> None:
    for found in ranks(2, frozen_and_thawed, stage):
        assert 4 * 272 / 2 <= found.pop("frozen masters") < 4 * 272 / 2 * 1.6  # half of the trained layer, padded
        assert found == {"states": 4, "masters": FP32, "closed": FP32}


def from_meta(stage: int) -> tuple[bool, torch.dtype]:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = make_model()
    model = zf.shard(model, stage=stage, precision="bf16", init=fill)
    zf.close(model)
    third = torch.full_like(model.head.weight, 1 / 3)
    return torch.equal(model.head.weight.detach(), third), model.head.weight.dtype


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 1 / 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_on_the_meta_device_starts_from_fp32_values(ranks: Any, stage: int) -> None:
    assert ranks(2, from_meta, stage) == [(True, FP32)] * 2


class Mixture(nn.Module):
    """Tensors in all kinds of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Any, ...]:
        y = self.layer(x) * scale
        return y, {"inner": [y + 1]}, "text", torch.arange(3)


def outputs() -> tuple[Any, ...]:
    policy = zf.Precision(parameters=BF16, outputs=FP32)
    model = zf.shard(Mixture(), stage=3, precision=policy)
    first, second, text, numbers = model(torch.ones(1, 4), scale=torch.ones(1, dtype=torch.float64))
    F.mse_loss(first, torch.zeros(1, 4)).backward()
    zf.close(model)
    return first.dtype, second["inner"][0].dtype, text, numbers.dtype


def test_outputs_are_cast_wherever_they_are(ranks: Any) -> None:
    assert ranks(1, outputs) == [(FP32, FP32, "text", torch.int64)]


def hugging_face(name: str, keep: Any) -> tuple[list[float], list[float]]:
    """Losses in fp32 and in bf16."""
    from tests.zoo import ZOO, build
    from tests.zoo import batches as batches_of

    def train(precision: Any) -> list[float]:
        model = build(ZOO[name])
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = zf.prepare(model, torch.optim.AdamW(trained, lr=1e-3), stage=3, precision=precision)
        losses = []
        for batch in batches_of(ZOO[name], 3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        zf.close(model)
        return losses

    return train(None), train(zf.Precision(parameters=BF16, keep=keep))


@pytest.mark.parametrize(
    ("name", "keep"),
    [("llama_lora", None), ("mixtral", ["*.gate"]), ("switch", ["*.router"]), ("conv_net", None)],
)
def test_models_of_others_train_in_bf16(ranks: Any, name: str, keep: Any) -> None:
    for plain, half in ranks(2, hugging_face, name, keep):
        assert half == pytest.approx(plain, rel=0.03), (plain, half)


def alone(stage: int) -> dict[str, Any]:
    """One rank: parameters are released at every stage, and what is used outside its unit must live on."""
    found: dict[str, Any] = {}
    (batch,) = batches(1)

    def prepared() -> Any:
        model = make_model()
        return zf.prepare(model, sgd(model.parameters()), stage=stage, precision="bf16")

    def norm(model: Any) -> float:
        return sum(zf.full(p.grad).float().pow(2).sum().item() for p in model.parameters()) ** 0.5

    model, optimizer = prepared()
    for _ in range(3):
        model(*batch).backward()
    three = norm(model)
    model.zero_grad()
    model(*batch).backward()
    found["cleared"] = three / norm(model)
    zf.close(model)

    model, optimizer = prepared()
    if stage < 3:
        penalty = sum(p.float().pow(2).sum() for p in model.parameters())
        (model(*batch) + penalty).backward()
        state = {name: p.detach() for name, p in model.named_parameters()}
        model(*batch)
        optimizer.step()
        found["alias"] = all(torch.equal(state[name], p) for name, p in model.named_parameters())
        with torch.no_grad():
            model.head.weight.zero_()
        try:
            model(*batch)
        except RuntimeError as error:
            found["changed"] = str(error)
    zf.close(model)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_alone(ranks: Any, stage: int) -> None:
    (found,) = ranks(1, alone, stage)
    assert found["cleared"] == pytest.approx(3, rel=0.01)
    if stage < 3:
        assert found["alias"]
        assert "'head.weight' was changed in place" in found["changed"]


def averaged(row: Any) -> tuple[float, float, float]:
    """Of an average: the distance from one by hand, from what a model shows with it, and after it is back."""
    model = make_model()
    model, optimizer = zf.prepare(model, sgd(model.parameters()), precision="bf16", **settings_of(row))
    average = zf.EMA(model, decay=0.75)

    def weights() -> list[Tensor]:
        with zf.full_params(model):
            return [p.detach().clone() for p in model.parameters()]

    expected = weights()
    for number, batch in enumerate(batches(4)):
        loss = model(*batch)
        (loss * (float("nan") if number == 2 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number != 2:  # skipped
            expected = [torch.lerp(mean, weight, 0.25) for mean, weight in zip(expected, weights(), strict=True)]
    names = [name for name, _ in model.named_parameters()]
    state = average.state_dict()
    found = [zf.full(state[name]) for name in names]
    before = weights()
    with average.swapped():
        shown = weights()
        model(*batch)
    after = weights()
    assert average.updates == 3
    average.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in zip(names, found, strict=True)})
    with average.swapped():
        assert all(not weight.any() for weight in weights())
    zf.close(model)
    return (
        largest_difference(expected, found),
        largest_difference(found, shown),
        largest_difference(before, after),
    )


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("row", [0, 2, (3, "whole"), "hsdp"])
def test_an_average_of_the_weights(ranks: Any, row: Any) -> None:
    for by_hand_off, shown_off, after_off in ranks(2, averaged, row):
        assert by_hand_off <= 1e-7
        assert shown_off == after_off == 0


def closures() -> list[float]:
    """LBFGS calls its closure several times in a step; the losses, with masters."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    model, optimizer = zf.prepare(model, optimizer, stage=0, precision="bf16")
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(3, 8)).float() - 1).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    zf.close(model)
    return losses


def test_a_closure_that_runs_several_times(ranks: Any) -> None:
    first, second = ranks(2, closures)
    assert first == second
    assert first[-1] < 0.5 * first[0]


def recomputed(reentrant: bool) -> float:
    """A checkpoint around the whole model: the distance of its gradients from those without."""

    def gradients(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = zf.shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), stage=3, precision="bf16")
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        else:
            out = model(x)
        out.float().pow(2).mean().backward()
        found = [zf.full_grad(p) for p in model.parameters()]
        zf.close(model)
        return [gradient for gradient in found if gradient is not None]

    return largest_difference(gradients(False), gradients(True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model(ranks: Any, reentrant: bool) -> None:
    assert ranks(2, recomputed, reentrant) == [0.0, 0.0]
