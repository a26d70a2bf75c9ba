"""One stage of a pipeline in torch's terms: what goes in, what comes out, which schedule runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.pipelining import PipelineStage

from zerofold.activation.checkpointing import is_selective
from zerofold.parallel.schedules import ScheduleKind
from zerofold.parallel.split import Split, Stage
from zerofold.parallel.stand_ins import Failure, Reached
from zerofold.timing import OTHER, Tape

LossFn = Callable[[Any, Any], Tensor]
_REENTRANT = "CheckpointFunctionBackward"  # as autograd knows torch's checkpoints with use_reentrant=True
WAIT_UNIT = "pipeline"  # as the ledger calls what is waited for between a stage's micro-batches


class MicroBatch(NamedTuple):
    """Arguments of the model, and what its output is compared with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


class Stream(NamedTuple):
    """What goes from stage to stage for one micro-batch."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class StageModule(nn.Module):
    """The model as one stage runs it: from what was received to what is sent on, or to the loss."""

    def __init__(self, model: nn.Module, split: Split, stage: Stage, loss_fn: LossFn | None) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        self.split, self.stage = split, stage
        self.is_last = stage.index == len(split.stages) - 1
        self.batches: list[MicroBatch] = []
        self.number = 0  # of the one that runs: torch's schedules see numbers alone, so inputs may be anything
        self.stream: Stream | None = None
        self.splits_backward = False
        self.goes_on: Callable[[], bool] = lambda: True
        """Whether all ranks that share this stage's layers have failed as well: else they wait for this one."""

    def forward(self, *received: Tensor) -> Tensor:
        """After an error zeros take the place of outputs, so that no other stage waits for what does not come: the
        schedule runs to its end, and then all ranks raise (`Pipeline`)."""
        if self.split.course.failure is None:
            try:
                return self._run(*received)
            except Exception as error:
                if not self.goes_on():
                    raise
                self.split.course.failure = Failure(self.stage.index, error)
        stream = self.stream
        assert stream is not None, "known before a schedule runs"
        if received:
            nothing = received[0] * 0  # in the graph, or there would be no gradient to send back
        else:
            device = next(self.model.parameters()).device
            nothing = torch.zeros(stream.shape, dtype=stream.dtype, device=device).requires_grad_() * 0
        return nothing.sum().float().reshape(1) if self.is_last else nothing

    def _run(self, *received: Tensor) -> Tensor:
        batch = self.batches[self.number]
        course = self.split.course
        course.first, course.stop, course.was_received = self.stage.first, self.stage.stop, False
        course.received = _own(received[0]) if received else None
        self.split.seat(self.stage.index)
        try:
            output = self.model(*batch.args, **batch.kwargs)
        except Reached as reached:
            return self._splittable(self._checked(reached.stream))
        finally:
            course.received = course.stop = None
            self.split.seat(None)
        if not self.is_last:
            raise RuntimeError(
                f"the model's forward ended without calling the block after stage {self.stage.index}: every block must "
                "be called, in order (no early exit, no layer drop)"
            )
        self._check_received()
        return self._splittable(torch.stack([self._loss(output, batch.target)]))

    def _splittable(self, output: Tensor) -> Tensor:
        """Looks in each step, since checkpoints may be switched on between two, at its first micro-batch: torch would
        fail in the backward of one rank, and the others wait for it."""
        looks = self.splits_backward and self.number == 0
        for node in _graph(output.grad_fn) if looks else ():
            way, fix = _unsplittable(node)
            if way:
                raise ValueError(
                    f"stage {self.stage.index} has checkpoints with {way}, whose backward cannot be split as "
                    f"schedule='zero_bubble' and 'zbv' do: {fix}, or use schedule='1f1b'"
                )
        return output

    def _checked(self, stream: Tensor) -> Tensor:
        self._check_received()
        expected = self.stream
        if expected is not None and (stream.shape != expected.shape or stream.dtype is not expected.dtype):
            raise ValueError(
                f"stage {self.stage.index} would send {tuple(stream.shape)} in {stream.dtype}, but blocks get "
                f"{tuple(expected.shape)} in {expected.dtype}: a pipeline needs blocks that return what they take"
            )
        # No copy, and no view to autograd: zero-bubble schedules detach outputs in place, which it forbids for views.
        whole = stream.contiguous()
        return torch.ops.aten._unsafe_view(whole, whole.shape) if whole._is_view() else whole

    def _check_received(self) -> None:
        if self.stage.first > 0 and not self.split.course.was_received:
            raise RuntimeError(
                f"the model's forward left out the block before stage {self.stage.index}: every block must be called, "
                "in order (no layer drop)"
            )

    def _loss(self, output: Any, target: Any) -> Tensor:
        loss = getattr(output, "loss", output) if self.loss_fn is None else self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            who = "the model" if self.loss_fn is None else "loss_fn"
            raise ValueError(
                f"pipeline: {who} returned {what}: a scalar loss is needed; pass loss_fn=(output, target) -> loss"
            )
        return loss.reshape(()).float()


def _own(received: Tensor) -> Tensor:
    """What a block is given. Torch receives into the same tensors in every step, past autograd, and who knows tensors
    by themselves would take it for the one of a step before: a checkpoint's store, after an error, for one it has.
    To autograd it is neither a leaf nor a view, so a block may change it in place.
    """
    return torch.ops.aten._unsafe_view(received, received.shape)


def _unsplittable(node: Node) -> tuple[str, str]:
    """With what a checkpoint that ends here is made, and what to do about it; nothing where backward may be split."""
    if node.name() == _REENTRANT:
        return "use_reentrant=True", "pass use_reentrant=False"
    return ("policy=", "leave it out") if is_selective(node) else ("", "")


def _graph(root: Node | None) -> Iterator[Node]:
    """Every node that the output of `root` depends on."""
    ahead = [] if root is None else [root]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        yield node
        found = {inner for inner, _ in node.next_functions if inner is not None} - seen
        seen |= found
        ahead += found


class _TorchStage(PipelineStage):
    """Torch's stage, which tells its module which micro-batch runs, others when gradients of weights have been
    assigned past autograd's own accumulation, and the ledger when it computes: between that it waits for other stages.
    """

    module: StageModule
    after_weights: Callable[[], None]
    tape: Callable[[], Tape | None]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.module.number = fwd_chunk_id
        try:
            with self._computing():
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:  # torch's own, about shapes: what the model said is its cause
            raise error.__cause__ or error from None

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._computing():
            super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._computing():
            super().backward_weight_one_chunk(*args, **kwargs)
        self.after_weights()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        tape = self.tape()
        if tape is None:
            yield
            return
        tape.end()
        try:
            yield
        finally:
            tape.begin(OTHER, WAIT_UNIT)


class Runner:
    """One of torch's schedules for micro-batches of one shape: forwards and backwards of a step."""

    def __init__(
        self,
        modules: list[StageModule],
        kind: ScheduleKind,
        group: dist.ProcessGroup,
        stream: Stream,
        microbatches: int,
        device: torch.device,
        after_weights: Callable[[], None],
        tape: Callable[[], Tape | None],
    ) -> None:
        self.modules, self.stream, self.microbatches, self._tape = modules, stream, microbatches, tape
        stages = [self._stage(module, group, device, after_weights) for module in modules]

        def mean(output: Tensor, number: Tensor) -> Tensor:
            return output.sum() / microbatches

        first: Any = stages if kind.has_chunks else stages[0]
        # A mean over micro-batches is in the loss: torch's own division would miss gradients it does not see.
        self._schedule = kind.of_torch(first, microbatches, loss_fn=mean, scale_grads=False)

    def _stage(
        self, module: StageModule, group: dist.ProcessGroup, device: torch.device, after_weights: Callable[[], None]
    ) -> _TorchStage:
        # Torch receives into what requires a gradient exactly where these do.
        example = torch.empty(self.stream.shape, dtype=self.stream.dtype, device="meta", requires_grad=True)
        loss = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
        stage = _TorchStage(
            module,
            module.stage.index,
            len(module.split.stages),
            device,
            input_args=() if module.stage.index == 0 else (example,),
            output_args=(loss if module.is_last else example,),
            group=group,
        )
        stage.module, stage.after_weights, stage.tape = module, after_weights, self._tape
        return stage

    @property
    def nbytes(self) -> int:
        """Of what torch keeps to receive into: for each micro-batch the stream, and its gradient."""
        received = sum((not module.is_last) + (module.stage.index > 0) for module in self.modules)
        return received * self.microbatches * self.stream.nbytes

    def run(self, batches: list[MicroBatch]) -> Tensor | None:
        """The mean loss, on the rank that has the last stage."""
        for module in self.modules:
            module.batches, module.stream = batches, self.stream
        numbers = torch.arange(self.microbatches)
        losses: list[Tensor] = []
        tape = self._tape()
        if tape is not None:
            tape.begin(OTHER, WAIT_UNIT)
        try:
            self._schedule.step(target=numbers, losses=losses)
        finally:
            forget(self.modules)
            if tape is not None:
                tape.end()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None


def forget(modules: list[StageModule]) -> None:
    for module in modules:
        module.batches = []


def run_forwards(
    modules: list[StageModule],
    batches: list[MicroBatch],
    stream: Stream,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor | None:
    """Without gradients: the mean loss, on the rank that has the last stage.

    One micro-batch goes through all stages of a rank before the next: so all ranks send and receive in one order, and
    none waits for another that waits for it. Torch's schedules cannot run forwards alone where a rank hands on to
    itself.
    """
    ranks = dist.get_process_group_ranks(group)
    stages = modules[0].split.stages
    here = modules[0].stage.rank
    losses: list[Tensor] = []
    sent: list[tuple[Any, Tensor]] = []  # each with its work, which needs it
    for module in modules:
        module.batches, module.stream = batches, stream
    try:
        for number in range(len(batches)):
            output: Tensor | None = None
            for module in modules:
                index = module.stage.index
                received: tuple[Tensor, ...] = ()
                if index and stages[index - 1].rank == here:
                    assert output is not None, "a rank's stages run in their order"
                    received = (output,)
                elif index:
                    received = (torch.empty(stream.shape, dtype=stream.dtype, device=device),)
                    dist.recv(received[0], src=ranks[stages[index - 1].rank], group=group)
                module.number = number
                output = module(*received)
                if module.is_last:
                    losses.append(output)
                elif stages[index + 1].rank != here:
                    sent.append((dist.isend(output, dst=ranks[stages[index + 1].rank], group=group), output))
    finally:
        forget(modules)
    for work, _ in sent:
        work.wait()
    return torch.cat(losses).mean() if losses else None
