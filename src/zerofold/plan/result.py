"""What `zf.plan` finds: rows, one to choose, and both as a dictionary, as settings and as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from zerofold.placement import row
from zerofold.plan.advice import Advice, searched_sentence
from zerofold.plan.configs import ds_config, native, pipeline_arguments, tensor_arguments
from zerofold.plan.held import ranks_of, widths_of
from zerofold.plan.machine import GB, Machine
from zerofold.plan.named import named_costs, nearest_named
from zerofold.plan.pipelining import bubble_part, chunks_of, in_flight
from zerofold.plan.point import Prediction, degrees_in_words, name_of
from zerofold.plan.shape import ModelShape
from zerofold.plan.states import StateBytes, elements_sent, paper_bytes
from zerofold.plan.text import plan_text


@dataclass(frozen=True)
class Searched:
    """What comes out when batch, checkpoints and degrees are free."""

    best: Prediction | None = None
    tried: int = 0
    larger: str = ""
    """What the next larger model needs, in a sentence."""
    samples: int | None = None
    """Of a step of all ranks, where it was given."""
    is_done: bool = True
    """There was something to search with: activations are known."""

    @property
    def sentence(self) -> str:
        return searched_sentence(self.best, self.tried, self.samples) if self.is_done else ""


@dataclass(frozen=True)
class Plan:
    """What `zf.plan` found.

    `stages` has a prediction for each row with all states on the device, `offloaded` those with tiers; `recommended`
    is one of them or found by the search, None where nothing fits.
    """

    model: ModelShape
    machine: Machine
    stages: tuple[Prediction, ...]
    offloaded: tuple[Prediction, ...]
    recommended: Prediction | None
    advice: Advice
    searched: Searched
    paper: dict[str, float] = field(default_factory=dict)
    """The memory model of ZeRO-Infinity for a transformer, where its numbers are known."""
    remake: Callable[[int], ModelShape] | None = field(default=None, compare=False, repr=False)
    """The model with sequences of another length, where it is made by formula."""
    global_batch: int | None = None
    """Samples of a step of all ranks, where these were given and each row has divided them for itself."""

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of `zf.prepare` for what is recommended; "mesh" is the shape of a device mesh."""
        found = self.recommended
        return {} if found is None else native(found.point, ranks_of(self.machine, found.point), found.memory)

    @property
    def ds_config(self) -> dict[str, Any]:
        """The same as a ds_config.json, or the nearest that one can say: `ds_config_note` has what that costs."""
        found = self.named
        return {} if found is None else ds_config(found.point, ranks_of(self.machine, found.point))

    @cached_property
    def named(self) -> Prediction | None:
        """What the ds_config comes to: what is recommended, where its tiers have names there."""
        found = self.recommended
        return None if found is None else nearest_named(self.model, self.machine, found)

    @property
    def ds_config_note(self) -> str:
        """In a sentence, what the ds_config costs against the recommendation; nothing where it is the same."""
        found, named = self.recommended, self.named
        return "" if found is None or named is None else named_costs(found, named)

    @property
    def mesh(self) -> dict[str, Any]:
        """How the devices are divided, and what a pipeline of them costs: the part of a step in which a stage waits for
        others, and the micro-batches whose activations the first stage keeps at once."""
        point = (self.recommended or self.stages[0]).point
        return {
            "data": ranks_of(self.machine, point).data,
            "tensor": point.tensor,
            "sequence_parallel": point.sequence_parallel,
            "loss_parallel": point.loss_parallel,
            "pipeline": point.pipeline,
            "schedule": point.schedule if point.pipeline > 1 else None,
            "chunks": chunks_of(point),
            "bubble": bubble_part(point),
            "in_flight": in_flight(point),
        }

    @property
    def mesh_sentences(self) -> list[str]:
        """Nothing where all devices are data-parallel ranks."""
        point, mesh = (self.recommended or self.stages[0]).point, self.mesh
        if point.tensor * point.pipeline == 1:
            return []
        found = [f"{self.machine.devices} devices: data {mesh['data']}, {degrees_in_words(point)}"]
        if point.pipeline > 1:
            waits = f"a stage waits {100 * mesh['bubble']:.0f}% of its time for others"
            kept = f"the first keeps activations of {mesh['in_flight']:g}"
            found.append(f"{point.accumulate} micro-batches: {waits}, and {kept}")
            found.append(
                "until the last of them is through, a stage's units stay gathered and its gradients whole, for one "
                f"reduction{self._pipeline_costs()}"
            )
        return found

    def _pipeline_costs(self) -> str:
        cut = next((each for each in self.stages if row(each.point.stage).parameters.is_cut), None)
        if cut is None or self.mesh["data"] == 1:
            return ""
        gathered, whole = (cut.memory.device[line] / GB for line in ("gathered units", "local gradients"))
        return f" ({name_of(cut.point)}: {gathered:.2f} and {whole:.2f} GB)"

    @property
    def next_larger(self) -> str:
        """What a model of twice the blocks needs, in a sentence."""
        return self.searched.larger

    def to_dict(self) -> dict[str, Any]:
        """What `zerofold plan --json` prints."""
        chosen = self.recommended
        return {
            "title": f"{self.model.name} on {self.machine.devices} of {self.machine.name}",
            "model": {
                "name": self.model.name,
                "psi": self.model.parameters,
                "trained": self.model.trained,
                "source": self.model.source,
                "layers": self.model.layers,
                "hidden": self.model.hidden,
                "heads": self.model.heads,
                "vocab": self.model.vocab,
                "tokens": self.model.tokens,
                "notes": list(self.model.notes),
            },
            "machine": {
                "name": self.machine.name,
                "source": self.machine.source,
                "devices": self.machine.devices,
                "per_node": self.machine.per_node,
                "device_memory_bytes": self.machine.device_memory,
                "host_memory_bytes": self.machine.host_memory,
                "disk_bytes": self.machine.disk,
            },
            "mesh": self.mesh,
            "global_batch": self.global_batch,
            "counted": "model_state_bytes and its parts as the ZeRO paper counts; held_bytes as zerofold holds them",
            "stages": [self._row(each) for each in self.stages],
            "offloaded": [self._row(each) for each in self.offloaded],
            "recommended": None
            if chosen is None
            else {
                **self._row(chosen),
                "reason": self.advice.reason,
                "config": self.config,
                "tensor_config": tensor_arguments(chosen.point),
                "pipeline_config": pipeline_arguments(chosen.point),
                "ds_config": self.ds_config,
                "ds_config_note": self.ds_config_note,
            },
            "advice": list(self.advice.sentences),
            "search": None
            if self.searched.best is None
            else {**self._row(self.searched.best), "tried": self.searched.tried},
            "next_larger": self.next_larger,
            "paper": self.paper,
        }

    def _row(self, found: Prediction) -> dict[str, Any]:
        point, memory, times = found.point, found.memory, found.times
        ranks = ranks_of(self.machine, point)
        share = self.model.parameters / (point.tensor * point.pipeline)
        states = paper_bytes(share, point.stage, ranks.data, group=ranks.group, each=_paper_widths(point.precision))
        return {
            "stage": int(point.stage) if point.stage.isdigit() else point.stage,
            "tiers": "auto"
            if point.auto
            else {
                "optimizer": point.tiers.optimizer.value,
                "gradients": point.tiers.gradients.value,
                "parameters": point.tiers.parameters.value,
            },
            "group": ranks.group if _has_groups(point.stage) else None,
            "micro_batch": point.micro_batch,
            "accumulate": point.accumulate,
            "checkpoint_every": point.checkpoint_every,
            "checkpoints_on": point.checkpoints_on,
            "partition": point.partition,
            "tensor": point.tensor,
            "sequence_parallel": point.sequence_parallel,
            "loss_parallel": point.loss_parallel,
            "pipeline": point.pipeline,
            "schedule": point.schedule,
            "precision": point.precision,
            "contiguous_gradients": point.contiguous_gradients,
            "contiguous_checkpoints": point.contiguous_checkpoints,
            "parameters_bytes": round(states.parameters),
            "gradients_bytes": round(states.gradients),
            "optimizer_bytes": round(states.optimizer),
            "model_state_bytes": round(states.total),
            "comm_elements_per_psi": elements_sent(point.stage, ranks.data, group=ranks.group),
            "held_bytes": dict(memory.device),
            "gradient_arena_bytes": memory.gradient_arena,
            "host_bytes": dict(memory.host),
            "disk_bytes": dict(memory.disk),
            "device_peak_bytes": memory.device_peak,
            "device_need_bytes": memory.device_need,
            "peak_at": memory.peak_at,
            "fits": found.fits,
            "lacks": found.lacks,
            "sent": [
                {"collective": name, "group": group, "elements": elements, "bytes": found.traffic.bytes[name, group]}
                for (name, group), elements in found.traffic.elements.items()
            ],
            "step_seconds": times.step,
            "compute_seconds": times.compute,
            "update_seconds": times.update,
            "exposed_seconds": dict(times.exposed),
            "efficiency": times.efficiency,
            "arithmetic_intensity": dict(times.intensity),
            "bottleneck": times.bottleneck,
            "samples_per_second": found.samples_per_second,
        }

    def text(self, *, width: int = 100) -> str:
        """Tables and sentences for a person."""
        return plan_text(self, width=width)


def _has_groups(stage: str) -> bool:
    placed = row(stage)
    return placed.copy is not None or placed.reduces_across


def _paper_widths(precision: str) -> StateBytes:
    """16-bit: 2 + 2 + 12. In fp32 there is no second master: 4 + 4 + 8."""
    widths = widths_of(precision)
    return StateBytes(widths.compute, widths.compute, widths.moments + (widths.master if widths.has_master else 0))
