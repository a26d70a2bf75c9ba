"""Trainer, Accelerate and PEFT on whatever library answers to the name `deepspeed`: what one rank does.

Nothing here names zerofold, so what runs is what a user's script runs; hugging_face_runs.py starts the ranks.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

VOCABULARY, LENGTH, SAMPLES = 64, 12, 40
STEPS, SAVE_AT = 6, 3
LEARNING_RATE = 1e-2
ADAMW = {
    "type": "AdamW",
    "params": {
        "lr": "auto",
        "betas": "auto",
        "eps": "auto",
        "weight_decay": "auto",
        "torch_adam": True,  # DeepSpeed's own kernels would have to be compiled on the spot
    },
}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}
# Hugging Face mixes its own optimizers and schedules with the config's: each stage shows another mix.
SECTIONS: dict[int, dict[str, Any]] = {
    1: {},
    2: {"optimizer": ADAMW},
    3: {"optimizer": ADAMW, "scheduler": WARMUP},
}


def config_for(stage: int) -> dict[str, Any]:
    """The config of the Hugging Face documentation: nearly everything is "auto"."""
    return {
        **SECTIONS[stage],
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }


def config_file(config: dict[str, Any], folder: Path) -> str:
    """A rank writes its own: the other may be reading just now."""
    file = folder / f"ds_config-{os.environ['RANK']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config))
    return str(file)


def tiny_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(LlamaConfig))


def llama_config(kind: Any) -> Any:
    return kind(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


def samples() -> list[dict[str, Any]]:
    import torch

    drawn = torch.Generator().manual_seed(7)
    starts = torch.randint(2, VOCABULARY, (SAMPLES, 1), generator=drawn)
    rows = list(2 + (starts + 3 * torch.arange(LENGTH)) % (VOCABULARY - 2))
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def arguments(stage: int, folder: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "deepspeed": config_file(config_for(stage), folder),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "save_steps": SAVE_AT,
            "eval_strategy": "steps",
            "eval_steps": SAVE_AT,
            "logging_steps": 1,
            "learning_rate": LEARNING_RATE,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "seed": 3,
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "use_cpu": True,  # without a GPU, Accelerate counts its processes only when told so
            **options,
        }
    )


def trainer_for(model: Any, stage: int, folder: Path, **options: Any) -> Any:
    from transformers import Trainer

    data = samples()
    return Trainer(model=model, args=arguments(stage, folder, **options), train_dataset=data, eval_dataset=data[:8])


def curve(trainer: Any) -> dict[str, Any]:
    """What the Trainer logged: loss, norm before clipping and learning rate of each step, and the evaluations."""
    logged = trainer.state.log_history
    steps = [entry for entry in logged if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in steps],
        "norms": [entry["grad_norm"] for entry in steps],
        "rates": [entry["learning_rate"] for entry in steps],
        "evaluations": [entry["eval_loss"] for entry in logged if "eval_loss" in entry],
    }


def loss_of(model: Any) -> float:
    """The loss of the first eight samples, on a model that is no engine."""
    import torch

    rows = torch.stack([sample["input_ids"] for sample in samples()[:8]])
    model.eval()
    with torch.no_grad():
        return float(model(input_ids=rows, labels=rows).loss)


def trainer_job(stage: int, folder: Path) -> dict[str, Any]:
    """Trains, evaluates, saves; a second Trainer resumes from the middle."""
    from transformers import LlamaForCausalLM

    first = trainer_for(tiny_llama(), stage, folder)
    first.train()
    whole = curve(first)
    first.save_model(str(folder / "model"))
    barrier()
    forget()
    second = trainer_for(tiny_llama(), stage, folder / "again")
    second.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVE_AT}"))
    resumed = curve(second)
    forget()
    return {
        **whole,
        "resumed": resumed["losses"][SAVE_AT:] if len(resumed["losses"]) > SAVE_AT else resumed["losses"],
        "saved": loss_of(LlamaForCausalLM.from_pretrained(folder / "model")),
    }


def lora_job(stage: int, folder: Path) -> dict[str, Any]:
    """A LoRA adapter under the Trainer: the frozen base is neither updated nor written into the adapter."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def adapted() -> Any:
        import torch

        base = tiny_llama()
        torch.manual_seed(1)
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    first = trainer_for(adapted(), stage, folder, learning_rate=2e-2)
    first.train()
    whole = curve(first)
    first.save_model(str(folder / "adapter"))
    barrier()
    forget()
    second = trainer_for(adapted(), stage, folder / "again", learning_rate=2e-2)
    second.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVE_AT}"))
    resumed = curve(second)["losses"]
    forget()
    return {
        **whole,
        "resumed": resumed[SAVE_AT:] if len(resumed) > SAVE_AT else resumed,
        "saved": loss_of(PeftModel.from_pretrained(tiny_llama(), folder / "adapter")),
    }


def accelerate_job(stage: int, folder: Path) -> dict[str, Any]:
    """The plain loop with DeepSpeedPlugin: accumulation, save_state and load_state, generation between two steps."""
    import torch
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
    from torch.utils.data import DataLoader
    from transformers.integrations import HfTrainerDeepSpeedConfig

    config = config_for(stage) | {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    if "optimizer" in config:
        config["optimizer"] = {**ADAMW, "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}

    file = config_file(config, folder)

    def prepared() -> tuple[Any, ...]:
        PartialState(cpu=True)  # as above
        plugin = DeepSpeedPlugin(hf_ds_config=HfTrainerDeepSpeedConfig(file))
        accelerator = Accelerator(deepspeed_plugin=plugin)
        model = tiny_llama()
        trained = list(model.parameters())
        if "optimizer" in config:
            optimizer: Any = DummyOptim(trained, lr=LEARNING_RATE, weight_decay=0.1)
        else:
            optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.1)
        if "scheduler" in config:
            scheduler: Any = DummyScheduler(optimizer, total_num_steps=40, warmup_num_steps=2)
        else:
            scheduler = None
        loader = DataLoader(samples(), batch_size=2)
        if scheduler is None:
            return accelerator, *accelerator.prepare(model, optimizer, loader), None
        return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)

    def losses_of(accelerator: Any, model: Any, optimizer: Any, batches: list[Any], scheduler: Any) -> list[float]:
        values = []
        model.train()
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            values.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        return values

    accelerator, model, optimizer, loader, scheduler = prepared()
    batches = list(loader)
    before = losses_of(accelerator, model, optimizer, batches[:4], scheduler)
    accelerator.save_state(str(folder / "state"))
    model.eval()
    prompt = torch.tensor([[1, 5, 9, 13]])
    words = accelerator.unwrap_model(model).generate(prompt, max_new_tokens=6, do_sample=False)
    after = losses_of(accelerator, model, optimizer, batches[4:10], scheduler)
    whole = accelerator.get_state_dict(model)
    total = sum(float(tensor.double().abs().sum()) for tensor in whole.values()) if accelerator.is_main_process else 0.0
    accelerator.unwrap_model(model).save_pretrained(  # by every rank, as Accelerate's documentation has it
        folder / "weights",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=whole,
    )
    barrier()
    forget()
    accelerator, model, optimizer, _, scheduler = prepared()
    accelerator.load_state(str(folder / "state"))
    resumed = losses_of(accelerator, model, optimizer, batches[4:10], scheduler)
    forget()
    return {
        "losses": before + after,
        "resumed": resumed,
        "words": words[0].tolist(),
        "total": total,
        "rate": float(optimizer.param_groups[0]["lr"]),
    }


def pretrained_job(stage: int, folder: Path) -> dict[str, Any]:
    """from_pretrained while a stage 3 config is alive goes through zero.Init; then the vocabulary grows."""
    import torch
    from transformers import LlamaForCausalLM, Trainer

    if torch.distributed.get_rank() == 0:
        tiny_llama().save_pretrained(folder / "base")
    barrier()
    data = samples()
    options = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
    alive = arguments(stage, folder / "evaluated", **options)
    model = LlamaForCausalLM.from_pretrained(folder / "base")
    loaded = Trainer(model=model, args=alive, eval_dataset=data[:8]).evaluate()["eval_loss"]
    forget()
    alive = arguments(stage, folder / "grown", **options)
    model = LlamaForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(5)
    model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    trainer = Trainer(model=model, args=alive, train_dataset=data)
    trainer.train()
    forget()
    return {"loaded": loaded, "plain": loss_of(tiny_llama()), "losses": curve(trainer)["losses"]}


def best_job(stage: int, folder: Path) -> dict[str, Any]:
    """In bf16, with activation checkpointing; the best checkpoint comes back on the live engine."""
    trainer = trainer_for(
        tiny_llama(),
        stage,
        folder,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        gradient_checkpointing=True,
        bf16=True,
        max_steps=4,
        save_steps=2,
        eval_steps=2,
    )
    trainer.train()
    best = trainer.evaluate()["eval_loss"]
    whole = curve(trainer)
    forget()
    return {"losses": whole["losses"], "rates": whole["rates"], "evaluations": whole["evaluations"], "best": best}


JOBS: dict[str, Callable[[int, Path], dict[str, Any]]] = {
    "trainer": trainer_job,
    "accelerate": accelerate_job,
    "lora": lora_job,
    "pretrained": pretrained_job,
    "best": best_job,
}


def barrier() -> None:
    import torch

    torch.distributed.barrier()


def forget() -> None:
    """Accelerate keeps its state in the class; a second Accelerator with another plugin needs a clean one."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    gc.collect()


def library_in_use() -> dict[str, Any]:
    """Who answered, and whether DeepSpeed could have: it stands further back on the path, or not at all."""
    import deepspeed

    own = str(Path(__file__).parent.parent / "src")
    others = [entry for entry in sys.path if not entry.startswith(own)]
    return {"version": deepspeed.__version__, "installed": PathFinder.find_spec("deepspeed", others) is not None}


def main(names: list[str], folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in names:
        stage, job = name.split("/")
        (folder / name).mkdir(parents=True, exist_ok=True)
        results[name] = JOBS[job](int(stage), folder / name)
    results["library"] = library_in_use()
    if torch.distributed.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
