"""One kind of call, recorded: forward, and where gradients are wanted backward, on memory of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gpupipe.errors import GraphError
from gpupipe.train.graphs.gradients import Observed, copies
from gpupipe.train.graphs.leaves import Leaves
from gpupipe.train.graphs.recorder import NotCaptured, Recorder, Recording
from gpupipe.train.graphs.signature import Opaque, apart, shares_memory, together


class Pending:
    """Forwards that were replayed and whose backward has not: till then no graph of the pool may run over what they keep.

    Attributes:
        count: how many there are.
        replays: forwards replayed so far.
    """

    def __init__(self) -> None:
        self.count = self.replays = 0

    def open(self) -> _Token:
        return _Token(self)


class _Token:
    """Closes itself when it goes, for a graph of autograd may be dropped without a backward."""

    def __init__(self, pending: Pending) -> None:
        pending.count += 1
        self.close = weakref.finalize(self, _less, pending)


def _less(pending: Pending) -> None:
    pending.count -= 1


class Graphed:
    """A call of one signature.

    Inputs are copied into memory outside of the graphs' pool; outputs and gradients are copied out of it. Parameters are read
    where they are.

    Args:
        recorder: of the device.
        function: what is called.
        given: (args, kwargs) of a call, which give the structure.
        module: whose parameters get gradients, where ``with_backward``, beside those among the inputs.
        with_backward: a backward may follow; else outputs have no gradient.
        observed: looks on at a function that runs backwards itself: a replay leaves the gradients that the call would leave.

    Raises:
        NotCaptured: when the work cannot be recorded.
    """

    def __init__(
        self,
        recorder: Recorder,
        function: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        module: torch.nn.Module | None,
        pending: Pending,
        *,
        with_backward: bool,
        observed: AbstractContextManager[Observed] | None = None,
    ) -> None:
        self._pending = pending
        inputs: list[torch.Tensor] = []
        apart(given, inputs)
        among = {id(each) for each in inputs}
        self.parameters = [
            each for each in (module.parameters() if module is not None else ()) if each.requires_grad and id(each) not in among
        ]
        leaves = Leaves([*self.parameters, *(each for each in inputs if isinstance(each, torch.nn.Parameter))])
        own = [leaves.twin(each) if isinstance(each, torch.nn.Parameter) else _twin(each) for each in inputs]
        self._inputs = [None if isinstance(each, torch.nn.Parameter) else each for each in own]
        """What is written to before a replay; None in the place of a parameter."""
        with leaves.in_place_of_parameters(module):
            self._record(recorder, function, together(given, iter(own)), own, leaves, with_backward, observed)

    def _record(
        self,
        recorder: Recorder,
        function: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        inputs: Sequence[torch.Tensor],
        leaves: Leaves,
        with_backward: bool,
        observed: AbstractContextManager[Observed] | None,
    ) -> None:
        self._made: Any = None
        versions = [each._version for each in inputs]

        def forward() -> None:
            with _autocast_without_cache(inputs):
                self._made = function(*given[0], **given[1])

        self._cleared: list[torch.Tensor] = []
        self._left: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._forward = recorder.record(forward) if observed is None else self._looked_on(observed, recorder, forward)
        self._changed = [
            place for place, (each, version) in enumerate(zip(self._inputs, versions, strict=True))
            if each is not None and each._version != version
        ]  # fmt: skip
        """Inputs that the call writes to, such as running means: what was given is to have it too."""
        self._outputs: list[torch.Tensor] = []
        try:
            apart(self._made, self._outputs)
        except Opaque as what:
            raise NotCaptured(f"the call returns {what}, which a graph cannot hand out") from None
        self._backward: Recording | None = None
        self.differentiable = [with_backward and output.requires_grad for output in self._outputs]
        if any(self.differentiable):
            self._record_backward(recorder, inputs, leaves)
        self._outputs = [output.detach() for output in self._outputs]
        self._made = together(self._made, iter(self._outputs))

    def _looked_on(
        self, observed: AbstractContextManager[Observed], recorder: Recorder, forward: Callable[[], None]
    ) -> Recording:
        with observed as seen:
            try:
                made = recorder.record(forward)
                self._cleared, self._left = seen.left()
            finally:
                seen.restore()
        seen.check()
        return made

    def _record_backward(self, recorder: Recorder, inputs: Sequence[torch.Tensor], leaves: Leaves) -> None:
        ends = [output for output, wanted in zip(self._outputs, self.differentiable, strict=True) if wanted]
        self._grad_outputs = [torch.zeros_like(end) for end in ends]
        ours = [*inputs, *[leaves.twin(each) for each in self.parameters]]
        wanted = [each for each in ours if each.requires_grad]
        past = [each for each in self.parameters if leaves.twin(each) is not each]  # for what reads them not by the module
        made: dict[int, torch.Tensor] = {}

        def backward() -> None:
            with torch.autocast(ends[0].device.type, enabled=False):  # as of a loop, which has left it by then
                found = torch.autograd.grad(ends, [*wanted, *past], self._grad_outputs, allow_unused=True)
            for leaf, grad in zip([*wanted, *[leaves.twin(each) for each in past]], found, strict=True):
                if grad is not None:
                    made[id(leaf)] = made[id(leaf)] + grad if id(leaf) in made else grad

        self._backward = recorder.record(backward)
        self._grads = [made.get(id(each)) for each in ours]

    @property
    def launches(self) -> int:
        """Of a forward and its backward."""
        return self._forward.launches + (self._backward.launches if self._backward is not None else 0)

    def fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether no input that the call writes to shares memory with another one, in which that would have to show."""
        return not self._changed or not shares_memory(self._changed, inputs)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Replays it for a call's tensors, in order."""
        if self._backward is None:
            outputs = self.replay(inputs)
        else:
            outputs = _Replay.apply(self, len(inputs), *inputs, *self.parameters)  # type: ignore[no-untyped-call]
        return together(self._made, iter(outputs))

    def replay(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The forward: copies in, and copies out."""
        with torch.no_grad():
            for own, given in zip(self._inputs, inputs, strict=True):
                if own is not None:
                    own.copy_(given, non_blocking=True)
            self._pending.replays += 1
            self._forward.replay()
            for place in self._changed:
                inputs[place].copy_(self._inputs[place])  # type: ignore[arg-type]
            for leaf in self._cleared:
                leaf.grad = None
            if self._left:
                for (leaf, _), grad in zip(self._left, copies([grad for _, grad in self._left]), strict=True):
                    leaf.grad = grad
            return tuple(output.clone() for output in self._outputs)

    def open(self) -> tuple[_Token, int]:
        """(what holds up other replays until the backward, the number of this one)."""
        return self._pending.open(), self._pending.replays

    def replay_backward(self, grads: Sequence[torch.Tensor | None], number: int) -> list[torch.Tensor | None]:
        """Gradients of inputs and parameters: copies, which autograd may keep or add to.

        Raises:
            GraphError: when another forward has run over what this one kept: of a backward that comes a second time.
        """
        assert self._backward is not None
        if number != self._pending.replays:
            raise GraphError(
                "a second backward of a call that was replayed, after another call was: its memory has been used again",
                fix="call backward() before the next forward, or run this one within gpupipe.train.graphs.paused()",
            )
        given = [grad for grad, wanted in zip(grads, self.differentiable, strict=True) if wanted]
        for own, grad in zip(self._grad_outputs, given, strict=True):
            if grad is None:
                own.zero_()
            else:
                own.copy_(grad)
        self._backward.replay()
        made = iter(copies([grad for grad in self._grads if grad is not None]))
        return [None if grad is None else next(made) for grad in self._grads]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphed: Graphed, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = graphed.replay(tensors[:count])
        ctx.graphed = graphed
        ctx.token, ctx.number = graphed.open()
        ctx.save_for_backward(*graphed.parameters)  # changed before the backward, they are an error, as without a graph
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[one for one, wanted in zip(outputs, graphed.differentiable, strict=True) if not wanted])
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        made = ctx.graphed.replay_backward(grads, ctx.number)
        ctx.token.close()
        return (None, None, *made)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory of their own, in the same order where elements do not share places."""
    own = torch.empty_like(tensor, memory_format=torch.preserve_format, requires_grad=False)
    return own.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _autocast_without_cache(inputs: Sequence[torch.Tensor]) -> torch.autocast:
    """The autocast that is on, but none of the casts that it keeps: they would lie in the graph's memory."""
    kind = inputs[0].device.type if inputs else "cuda"
    return torch.autocast(
        kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
    )
