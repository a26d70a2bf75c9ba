"""`zf.pipeline`: blocks on several ranks, by torch's schedules, with ZeRO over the ranks that have the same stage.

rank 0   [f0][f1][f2]        [b0][f3][b1]    [b2]    [b3]   gradients add up here, whole
rank 1       [f0][b0][f1][b1][f2][b2][f3][b3]               …
                                                         then one reduction over the data axis, once a step

All units of a stage stay gathered while its schedule runs: every micro-batch uses all of them.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofold.comm import CommError
from zerofold.engine import Engine
from zerofold.nested import map_tensors, tensors_in
from zerofold.parallel.anatomy import Example, read_anatomy
from zerofold.parallel.flow import check_flow
from zerofold.parallel.marks import HoldsStages
from zerofold.parallel.mesh import PIPELINE, Mesh
from zerofold.parallel.schedules import check_counts, owners_of_stages, schedule_kind
from zerofold.parallel.split import Cost, Split, Stage, cut_in_place, plan_stages
from zerofold.parallel.stage import LossFn, MicroBatch, Runner, StageModule, Stream, run_forwards
from zerofold.parallel.stand_ins import Failure
from zerofold.parallel.stopping import Stops
from zerofold.parallel.streams import Streams
from zerofold.parallel.tensor import spread_over_tensor_ranks
from zerofold.parallel.ties import Ties
from zerofold.plan.traffic import Share
from zerofold.timing import Tape

_KEPT_RUNNERS = 4  # shapes of micro-batches for which torch's buffers are kept
_OWN_LOSS = ("labels", "targets", "target")


def pipeline(
    model: nn.Module,
    mesh: Mesh,
    *,
    microbatches: int,
    schedule: str = "1f1b",
    loss_fn: LossFn | None = None,
    chunks_per_rank: int | None = None,
    split: Sequence[str] | None = None,
    cost: Cost | None = None,
    example: Example | None = None,
) -> Pipeline:
    """Cuts `model` into stages, in place: this rank keeps the blocks of its own under the names they have.

    Afterwards build the optimizer on what is left and place its states: `zf.prepare(pipe, optimizer, mesh=mesh)`.
    Models on the meta device are cut as well, so that no rank ever has memory for another one's stage. Over a tensor
    axis `zf.tensor_parallel` comes first, since it has to see the whole model; if it has not been called, it is here.

    mesh             whose pipeline axis the stages are dealt over
    microbatches     into how many equal parts `step` cuts a batch
    schedule         "1f1b", "gpipe", "interleaved", "zero_bubble" or "zbv": torch's schedules
    loss_fn          (output of the model, target) -> scalar, called on the last stage for each micro-batch; None for a
                     model that returns its loss, or something with a `loss`, when it is given labels
    chunks_per_rank  stages that a rank has: 1, with "interleaved" and "zbv" 2 by default
    split            names of the first block of each stage; by default the slowest stage is made as fast as possible
    cost             (name, module) -> what it costs, to balance stages by; by default the parameters that every
                     token is multiplied with
    example          arguments for the model, as a tuple or dict, where it does not take tokens: it runs once without
                     its blocks and without memory, to see which modules come before them and which after

    The model needs one row of blocks, each called once and in order, through which one tensor passes that keeps its
    shape. What blocks leave besides (auxiliary losses, hidden states) stays on its rank.

    >>> import torch, zerofold as zf
    >>> from zerofold.train.gpt import GPT, GPTConfig
    >>> mesh, model = zf.mesh(device="cpu"), GPT(GPTConfig(layers=2, hidden=16, heads=2, seq=8))
    >>> loss_fn = lambda logits, target: torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    >>> pipe = zf.pipeline(model, mesh, microbatches=2, loss_fn=loss_fn)
    >>> pipe, optimizer = zf.prepare(pipe, torch.optim.AdamW(pipe.parameters()), stage=1, mesh=mesh)
    >>> tokens = torch.zeros(4, 8, dtype=torch.long)
    >>> loss = pipe.step(tokens, target=tokens)
    >>> optimizer.step(); optimizer.zero_grad()
    >>> zf.close(pipe.model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a zf.mesh(...), not {type(mesh).__name__}")
    if Engine.is_on(model):
        raise ValueError("this model is already sharded: call zf.pipeline before zf.prepare or zf.shard")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r} must be a function (output, target) -> loss, or None")
    if cost is not None and not callable(cost):
        raise TypeError(f"cost={cost!r} must be a function (name, module) -> cost, or None")
    if example is not None and not isinstance(example, (tuple, list, Mapping)):
        raise TypeError(f"example={example!r} must be a tuple or a dict of the model's arguments, or None")
    if loss_fn is None and not _own_loss_names(model):
        raise ValueError(
            f"pipeline: loss_fn is missing, and {type(model).__name__} takes no labels to make a loss of: pass "
            "loss_fn=(output, target) -> loss"
        )
    kind = schedule_kind(schedule)
    chunks = kind.usual_chunks if chunks_per_rank is None else chunks_per_rank
    check_counts(schedule, mesh.pipeline, chunks, microbatches)
    spread_over_tensor_ranks(model, mesh)
    anatomy = read_anatomy(model, example)
    check_flow(model, anatomy, example)
    stages = plan_stages(anatomy, owners_of_stages(kind, mesh.pipeline, chunks), split, cost)
    cut = cut_in_place(model, anatomy, stages, mesh.coordinate[PIPELINE])
    return Pipeline(model, mesh, cut, schedule, microbatches, loss_fn)


class Pipeline(HoldsStages):
    """One rank's stages of a model with the schedule that runs them. Printed, it is a table of the stages.

    >>> import zerofold as zf
    >>> from zerofold.train.gpt import GPT, GPTConfig
    >>> model = GPT(GPTConfig(layers=2, hidden=16, heads=2, seq=8))
    >>> print(zf.pipeline(model, zf.mesh(device="cpu"), microbatches=2))  # the model makes its loss of targets=
    1 stage, 2 micro-batches, schedule 1f1b
    stage  rank  blocks           parameters  of all
        0     0  0 to 1               14,496    100%
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, split: Split, schedule: str, microbatches: int, loss_fn: LossFn | None
    ) -> None:
        if not isinstance(split, Split):
            raise TypeError("a Pipeline is made by zf.pipeline(model, mesh, microbatches=…)")
        self.model, self.mesh, self.microbatches, self.loss_fn = model, mesh, microbatches, loss_fn
        self.stages = split.stages
        self.memory: dict[str, int] = {}
        """Bytes of the last step that a step without a pipeline would not need: `gathered` parameters and whole
        `gradients` of this rank's stages, and `buffers` for what is received."""
        self._split, self._schedule, self._kind = split, schedule, schedule_kind(schedule)
        self._group = mesh.along(PIPELINE).get_group()
        self._ranks = dist.get_process_group_ranks(self._group)
        self._modules = [StageModule(model, split, stage, loss_fn) for stage in split.own]
        self._stops = Stops(mesh, split.course)
        for module in self._modules:
            module.goes_on = self._stops.tensor_ranks_failed
            module.splits_backward = self._kind.splits_backward
        self._runners: OrderedDict[Stream, Runner] = OrderedDict()
        self._streams = Streams(model, mesh, split, self._stops.tensor_ranks_failed)
        self._ties = Ties(split, mesh.coordinate[PIPELINE], self._group)
        self.leave_on(model)  # for zf.prepare and the ledger

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of this rank's stages."""
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Forward and backward of a whole batch: its mean loss, the same number on every rank of the pipeline.

        Arguments are those of the model. All ranks of a pipeline give the same ones. Tensors as long as the first one
        in dimension 0 are cut into micro-batches, `target` too; others go to every micro-batch as they are. The loss is
        the mean over micro-batches: that of the whole batch where `loss_fn` is a mean over equal parts.
        Gradients are reduced over the data axis once, at the end, unless this is inside `zf.no_sync`.
        """
        engine = self._engine()
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "pipe.step runs backward, so it cannot be called inside torch.no_grad(): use pipe.evaluate"
            )
        batch = MicroBatch(args, kwargs, target)
        batches = self._deal(batch)
        self._ties.make_alike(self.model)
        engine.hooks.begin_pipeline()
        try:
            with _held(engine):
                kept = self._ties.set_aside(engine)
                stream, loss = self._streams.agree(engine, batches, batch, "step", str(self)), None
                if stream is not None:
                    with self._counted(engine, "step", batches):
                        loss = self._runner(engine, stream).run(batches)
                self._stops.stop_together(engine)
                assert stream is not None, "all have stopped where there is none"
                self._count_sends(engine, stream, passes=2)
                self._ties.add(engine, kept)
                self._note_memory(engine)
        except BaseException as error:
            engine.hooks.end_pipeline(is_complete=False, waits=not isinstance(error, CommError))
            _clear_gradients(engine)
            error.add_note("pipe.step has cleared all gradients: sums of earlier steps held parts of this one")
            raise
        engine.hooks.end_pipeline(is_complete=True)
        return self._tell(loss, engine)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """The mean loss of a batch, without gradients. Arguments are those of `step`."""
        engine = self._engine()
        batch = MicroBatch(args, kwargs, target)
        batches = self._deal(batch)
        self._ties.make_alike(self.model)
        engine.hooks.begin_pipeline(trains=False)
        try:
            with _held(engine):
                stream, loss = self._streams.agree(engine, batches, batch, "evaluate", str(self)), None
                if stream is not None:
                    with self._counted(engine, "evaluate", batches):
                        loss = run_forwards(self._modules, batches, stream, self._group, engine.device)
                self._stops.stop_together(engine)
                assert stream is not None, "all have stopped where there is none"
                self._count_sends(engine, stream, passes=1)
        finally:
            engine.hooks.end_pipeline(trains=False)
        return self._tell(loss, engine)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        raise TypeError(
            "a pipeline is no module: call pipe.step(…) to train a batch, pipe.evaluate(…) for its loss alone"
        )

    def __str__(self) -> str:
        total = sum(stage.parameters for stage in self.stages)
        count = f"{len(self.stages)} stage{'s' * (len(self.stages) > 1)}"
        lines = [f"{count}, {self.microbatches} micro-batches, schedule {self._schedule}"]
        lines.append(f"{'stage':>5} {'rank':>5}  {'blocks':<12} {'parameters':>14} {'of all':>7}")
        for stage in self.stages:
            blocks = f"{stage.first} to {stage.stop - 1}" if stage.stop > stage.first + 1 else str(stage.first)
            share = f"{stage.parameters / total:.0%}"
            rank = self._ranks[stage.rank]  # of this pipeline; with other axes there are several side by side
            lines.append(f"{stage.index:>5} {rank:>5}  {blocks:<12} {stage.parameters:>14,} {share:>7}")
        return "\n".join(lines)

    def _engine(self) -> Engine:
        engine = Engine.of(self.model)
        if engine.boundary.micro_batches is not None:
            raise ValueError(
                "pipe.step: gradients of this model are already divided by gradient_accumulation_steps="
                f"{engine.boundary.micro_batches()}: set it to 1, since a pipeline's step takes all micro-batches"
            )
        return engine

    # micro-batches

    def _deal(self, batch: MicroBatch) -> list[MicroBatch]:
        """None where that cannot be: the others may have begun, so all of them are told at the end of the step."""
        course = self._split.course
        course.failure = None
        try:
            return self._parts(*batch)
        except Exception as error:
            course.failure = Failure(self._split.own[0].index, error)
            return []

    def _parts(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> list[MicroBatch]:
        if self.loss_fn is not None and target is None:
            raise ValueError("pipe.step: target is missing: pass target=, which loss_fn is called with")
        if self.loss_fn is None:
            given = inspect.signature(self.model.forward).bind_partial(*args, **kwargs).arguments
            names = _own_loss_names(self.model)
            if target is not None or not any(given.get(name) is not None for name in names):
                raise ValueError(
                    f"pipe.step: without loss_fn the model makes the loss itself: pass it {names[0]}= and no target="
                )
        whole = (args, kwargs, target)
        first = next((tensor for tensor in tensors_in(whole) if tensor.ndim), None)
        if first is None:
            raise ValueError("pipe.step: there is no tensor among its arguments, so there is no batch to cut")
        size, count = first.shape[0], self.microbatches
        if not size or size % count:
            raise ValueError(
                f"pipe.step: a batch of {size} does not make {count} equal micro-batches: give a multiple of {count}, "
                "or change microbatches="
            )

        def part(number: int) -> Callable[[Tensor], Tensor]:
            start = number * (size // count)
            return lambda t: t[start : start + size // count] if t.ndim and t.shape[0] == size else t

        return [MicroBatch(*(map_tensors(part(number), each) for each in whole)) for number in range(count)]

    # torch's schedules

    def _runner(self, engine: Engine, stream: Stream) -> Runner:
        """Made once for each stream: torch's stages keep buffers of its shape."""
        if stream not in self._runners:
            while len(self._runners) >= _KEPT_RUNNERS:
                self._runners.popitem(last=False)
            self._runners[stream] = Runner(
                self._modules,
                self._kind,
                self._group,
                stream,
                self.microbatches,
                engine.device,
                self._take_assigned_gradients,
                self._tape,
            )
        self._runners.move_to_end(stream)
        return self._runners[stream]

    def _tape(self) -> Tape | None:
        return Engine.of(self.model).clock.tape

    def _take_assigned_gradients(self) -> None:
        """Of the engine that the model has now: after zf.close it may have been placed anew."""
        Engine.of(self.model).hooks.take_assigned_gradients()

    def _tell(self, loss: Tensor | None, engine: Engine) -> Tensor:
        """The last stage's loss, to all ranks of the pipeline."""
        told = torch.zeros((), dtype=torch.float32, device=engine.device) if loss is None else loss.detach().clone()
        if len(self._ranks) > 1:
            dist.broadcast(told, src=self._ranks[self.stages[-1].rank], group=self._group)
            share = (len(self._ranks) - 1) / len(self._ranks)
            engine.traffic.add("broadcast", "loss", PIPELINE, share, told.element_size())
        return told

    # what is sent

    def _counted(self, engine: Engine, what: str, batches: list[MicroBatch]) -> AbstractContextManager[None]:
        return nullcontext() if engine.inside is None else engine.inside.around(what, self.model.training, batches)

    @property
    def share(self) -> Share:
        """What this rank has of the model's row, for a prediction of what it sends."""
        own = self._split.own
        return Share(
            sum(stage.stop - stage.first for stage in own),
            has_embedding=any(stage.index == 0 for stage in own),
            has_head=any(stage.index == len(self.stages) - 1 for stage in own),
            sends=sum(self._sends(stage, passes=2) for stage in own),
        )

    def _sends(self, stage: Stage, passes: int) -> int:
        """Of a micro-batch: its output to the rank of the next stage, and in the second pass a gradient back."""
        last, sends = len(self.stages) - 1, 0
        if stage.index < last:
            sends += self.stages[stage.index + 1].rank != stage.rank
        if stage.index > 0 and passes > 1:
            sends += self.stages[stage.index - 1].rank != stage.rank
        return sends

    def _count_sends(self, engine: Engine, stream: Stream, passes: int) -> None:
        size, width = stream.shape.numel(), stream.dtype.itemsize
        for stage in self._split.own:
            calls = self._sends(stage, passes) * self.microbatches
            if calls:
                engine.traffic.add("send", f"stage {stage.index}", PIPELINE, size, width, times=calls)

    def _note_memory(self, engine: Engine) -> None:
        self.memory = {
            "gathered": sum(slab.storage.nbytes for slab in engine.slabs()),
            "gradients": sum(slab.gradients.nbytes for slab in engine.slabs()),
            "buffers": sum(runner.nbytes for runner in self._runners.values()),
        }


def _clear_gradients(engine: Engine) -> None:
    """Of a step that failed other stages have computed with whatever came, and added it to what was there."""
    for slab in engine.slabs():
        for parameter in (*slab.parameters, *slab.faces):
            parameter.grad = None


@contextmanager
def _held(engine: Engine) -> Iterator[None]:
    """All units gathered, as they compute."""
    engine.hold_all(masters=False)
    try:
        yield
    finally:
        engine.let_go()


def _own_loss_names(model: nn.Module) -> list[str]:
    """Of the arguments from which a model makes its loss itself."""
    return [name for name in inspect.signature(model.forward).parameters if name in _OWN_LOSS]
