"""`zerofold simulate`: what it prints, and what it says to wrong input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import zerofold as zf
from zerofold.cli import build_app
from zerofold.simulation.quantities import bytes_per_second, seconds

SMALL = ["--layers", "2", "--hidden", "64", "--heads", "2", "--vocab", "128", "--seq", "16", "--batch", "2"]
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(build_app(), ["simulate", *arguments])


def test_json_has_times_bytes_and_memory() -> None:
    result = run(*SMALL, "--world-size", "64", "--rate-across", "1GB/s", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (point,) = found["points"]
    assert found["wires"]["across"]["rate"] == 1e9
    assert point["world"] == 64
    assert point["step_seconds"] == pytest.approx(
        point["compute_seconds"] + point["exposed_seconds"] + point["other_seconds"]
    )
    assert point["peak_bytes"] > sum(point["state_bytes"].values()) > 0
    assert set(point["sent_bytes"]) >= {"all_gather", "reduce_scatter"}


def test_slower_wires_and_no_overlap_expose_more() -> None:
    def exposed(*options: str) -> float:
        found = json.loads(run(*SMALL, "--world-size", "16", "--json", *options).stdout)
        return float(found["points"][0]["exposed_seconds"])

    fast, slow = exposed("--rate-across", "50GB/s"), exposed("--rate-across", "0.1GB/s")
    assert fast < slow < exposed("--rate-across", "0.1GB/s", "--no-overlap")
    assert exposed("--rate-across", "50GB/s", "--rings", "--gpus-per-node", "1") > exposed("--gpus-per-node", "1")


def test_a_curve_is_a_table() -> None:
    result = run(*SMALL, "--scaling", "weak", "--worlds", "1,8,1000")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.strip().startswith("zerofold ")]
    assert [row[5] == "–" for row in rows] == [True, False, False]  # noqa: RUF001  # one rank sends nothing to hide
    assert [row[1] for row in rows] == ["1", "8", "1,000"]
    assert rows[0][4] == "0.0"  # alone, nothing is waited for
    assert "simulated" in result.stdout


def test_a_hugging_face_config_is_enough(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    result = run("--model", str(tmp_path), "--checkpointing", "--seq", "16", "--batch", "1", "--json")
    assert result.exit_code == 0, result.output
    (point,) = json.loads(result.stdout)["points"]
    assert point["model"] == "llama"
    assert point["exposed"]["all_gather"] > 0


def test_a_config_names_its_head_and_what_it_is_fed(tmp_path: Path) -> None:
    """An encoder with its decoder, not the decoder alone, which is a causal language model too."""
    sizes = {"vocab_size": 96, "d_model": 32, "max_position_embeddings": 24, "encoder_layers": 2, "decoder_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bart", **sizes}))
    result = run("--model", str(tmp_path), "--seq", "16", "--batch", "1", "--json")
    assert result.exit_code == 0, result.output
    (point,) = json.loads(result.stdout)["points"]
    assert point["parameters"] == zf.plan(str(tmp_path), seq=16).model.parameters
    refused = run("--model", str(tmp_path), "--seq", "32")
    assert "--seq 32 is longer than the 24 positions" in refused.stderr


def test_a_function_builds_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_small_gpt.py").write_text(
        "from zerofold.bench.gpt import GPT, GPTSize\n"
        "def build():\n    return GPT(GPTSize(vocab=128, width=64, layers=2, heads=2, seq=16))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run("--model", "my_small_gpt:build", "--seq", "16", "--vocab", "128", "--batch", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["points"][0]["parameters"] > 100_000


def test_both_engines_on_the_cpu() -> None:
    result = run(*SMALL, "--device", "cpu", "--engine", "both", "--world-size", "8", "--steps", "1", "--json")
    assert result.exit_code == 0, result.output
    points = json.loads(result.stdout)["points"]
    assert [point["engine"] for point in points] == ["zerofold", "fsdp2"]
    assert all(point["clock"] == "real" for point in points)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stage", "4"], "--stage '4': choose one of"),
        (["--preset", "H2000"], "H200"),
        (["--rate-across", "fast"], "write 50GB/s"),
        (["--latency-inside", "soon"], "write 5us"),
        (["--latency-inside", ".."], "write 5us"),
        (["--latency-inside", "1e400"], "write 5us"),
        (["--scaling", "weak", "--plot", "curve.pdf"], "must end in .png or .svg"),
        (["--scaling", "weak", "--plot", "/dev/null/folder/curve.png"], "/dev/null/folder cannot be made"),
        (["--worlds", "1,x", "--scaling", "weak"], "whole numbers with commas"),
        (["--worlds", "8"], "--worlds 8 is of a curve over numbers of ranks; add --scaling weak or strong"),
        (["--plot", "curve.png"], "add --scaling"),
        (["--model", "nowhere"], "config.json"),
        (["--model", "no_such_module:build"], "no_such_module"),
        (["--engine", "both"], "--device cuda"),
        (["--heads", "7"], "heads"),
        (["--scaling", "strong", "--worlds", "8"], "ends at 2 ranks"),
        (["--stage", "hsdp", "--world-size", "12"], "do not divide into nodes"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(options: list[str], message: str) -> None:
    result = run(*SMALL, *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert message in line


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2", "n_embd": -64}, "negative dimension"),
        ({"model_type": "gpt2", "n_layer": "2"}, "model_type 'gpt2' cannot be built"),
        ({"n_layer": 2}, "has no model_type"),
    ],
)
def test_a_config_of_no_model_is_one_line(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    result = run("--model", str(file))
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: --model {file}")
    assert message in line


def test_quantities_as_people_write_them() -> None:
    assert bytes_per_second("--rate", "400Gb/s") == bytes_per_second("--rate", "50 GB/s") == 50e9
    assert seconds("--latency", "1.5ms") == 1.5e-3
    with pytest.raises(ValueError, match="--rate-across 400 is 400 bytes a second.*write a unit"):
        bytes_per_second("--rate-across", "400")
    for text in ("", "GB/s", "-1GB/s", "0GB/s", "1..2GB"):
        with pytest.raises(ValueError, match="^--rate-across .*is no rate"):
            bytes_per_second("--rate-across", text)


def test_a_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "weak.svg"
    result = run(*SMALL, "--scaling", "weak", "--worlds", "1,8", "--plot", str(file))
    assert result.exit_code == 0, result.output
    assert "<svg" in file.read_text()


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("zerofold.simulation.curves.simulate", lambda *_, **__: pytest.fail("it was simulated"))
    result = run(*SMALL, "--scaling", "weak", "--plot", str(tmp_path / "curve.png"))
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr


def test_a_function_whose_model_takes_other_arguments_is_told_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_forward.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Linear(2, 2)\n\n\ndef bad():\n    raise KeyError('oops')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, said in (
        ("build", "its forward takes (input: torch.Tensor) -> torch.Tensor, and is called with tokens and targets"),
        ("bad", "it raised KeyError: 'oops' (other_forward.py, line 9)"),
    ):
        result = run("--model", f"other_forward:{name}")
        assert result.exit_code == 2
        assert said in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
