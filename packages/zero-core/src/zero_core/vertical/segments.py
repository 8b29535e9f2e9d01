"""Autograd's graph of one micro-batch, cut where blocks begin and end.

[Note: segments]
A *segment* is what a micro-batch computes from the end of one block to the end of the next: the
model's code between them, and the block. The first is the *prologue*, which ends where the first
block begins; the last, behind all blocks, is the *epilogue* with the loss. Autograd can go backward
through one segment alone if nothing in its graph leads to an earlier one. So each tensor that needs
a gradient and goes from a segment to a later one is replaced by a *border* tensor: the same memory
with a node of its own, `_Border`, at which backward ends and leaves the gradient. Borders are what
a block returns, and what a block, or an operation between blocks, is given that was made in an
earlier segment: a position bias, the input of a residual connection. A tensor that gets into a
block in another way (over an attribute, say) is found, as its node is older than the segment, and
refused: `SegmentCrossing`.

[Note: one order of sums]
Autograd adds the gradients of a tensor one by one in the order in which they come: last use first.
A border that several segments use, or a parameter (a tied weight), gets parts of its gradient in
several backwards. Each of these begins with the sum so far as the gradient of one more root, to
which the engine of autograd adds what comes, one by one. So the sum has the bits of one backward.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from zero_core._torch import (
    METADATA_READS,
    AccumulateGrad,
    function_modes,
    next_sequence_number,
    pytree,
    sequence_number,
)
from zero_core.runtime.host_inputs import HostCopies, HostCopy


class PartialGrads:
    """Gradients of parameters that several segments use, by micro-batch and id of the parameter.

    They are complete when the last segment has added its part. Between two turns of a micro-batch
    they are on the host, if there are ``copies``. The device then has those of two turns at a time:
    the stream that computes waits until those of the turn before are on the host, and their memory
    is free then.
    """

    def __init__(self, num_micro_batches: int, copies: HostCopies | None) -> None:
        self._grads: list[dict[int, Tensor | HostCopy]] = [{} for _ in range(num_micro_batches)]
        self._copies = copies
        self._leaving: list[tuple[Tensor, HostCopy]] = []

    def put(self, number: int, param: int, grad: Tensor) -> None:
        self._grads[number][param] = grad

    def discard(self, number: int, param: int) -> None:
        self._grads[number].pop(param, None)

    def get(self, number: int, param: int) -> Tensor | None:
        """Return the sum so far, None without one. It stays on its own device to the turn's end."""
        found = self._grads[number].get(param)
        if isinstance(found, HostCopy):
            found = self._grads[number][param] = found.copies.take(found)
        return found

    def take_all(self, number: int) -> Iterator[tuple[int, Tensor]]:
        """Yield all with their parameters, and drop them."""
        for param in list(self._grads[number]):
            grad = self.get(number, param)
            assert grad is not None
            self.discard(number, param)
            yield param, grad

    def prefetch(self, number: int, params: Iterable[int]) -> None:
        """Begin to copy back what waits on the host of the gradients of ``params``."""
        for param in params if self._copies is not None else ():
            if isinstance(found := self._grads[number].get(param), HostCopy):
                found.copies.fetch(found)

    def end_turn(self, number: int) -> None:
        """Begin to copy down what can be moved."""
        if self._copies is None:
            return
        self.settle()
        grads = self._grads[number]
        for param, grad in grads.items():
            if isinstance(grad, Tensor):
                stored = self._copies.store(grad, len(self._grads))
                if stored is not None:
                    self._leaving.append((grad, stored))
                    grads[param] = stored

    def settle(self) -> None:
        """Drop what is being copied down, once the current stream has waited for that."""
        for _, stored in self._leaving:
            stored.copies.wait(stored)
        self._leaving.clear()


class SegmentCrossing(Exception):
    """A tensor of an earlier segment got into a block in another way than as its input."""

    def __init__(self, segment: int | None) -> None:
        super().__init__(segment)
        self.segment = segment  # that made it, None: of another micro-batch


@dataclass(eq=False, slots=True)
class _Gradient:
    """The sum so far of a border's gradient, and the ``anchor`` of its micro-batch."""

    anchor: Tensor
    grad: Tensor | None = None


class _Border(torch.autograd.Function):
    """Returns the values as a tensor whose backward ends here, and leaves its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: Tensor, gradient: _Gradient) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradient = gradient
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        if grad is not None:
            ctx.gradient.grad = grad
        return None, None, None


_BORDER: Any = _Border._backward_cls
"""Class of the nodes of `_Border` in a graph."""
_Entry = tuple[weakref.ref[Tensor], Tensor]
"""A tensor, and its border."""


@dataclass(eq=False)
class _Segment:
    """Start of one segment's backward, and the leaves that it may add to."""

    start: int  # `sequence_number` of its first node
    # the tensors that it made and that borders were put behind, without their memory
    sources: list[tuple[GradientEdge, _Gradient]] = field(default_factory=list)
    borders: dict[Any, _Gradient] = field(default_factory=dict)
    params: dict[int, Tensor] = field(default_factory=dict)  # the parameters in its graph, by id


class Segments(TorchFunctionMode):
    """The segments of one micro-batch. The prologue is number 0, block n of 0, 1, ... is n + 1.

    All methods but `backward`, `prefetch` and `params` are called on the thread that computes the
    forward. Between blocks it is a mode there, which replaces what operations are given that
    earlier segments made.
    """

    def __init__(self, partial: PartialGrads, micro_batch: int) -> None:
        """Keep in ``partial`` what other segments add to the gradient of a parameter."""
        super().__init__()
        self._partial = partial
        self._micro_batch = micro_batch
        self._segments = [_Segment(0)]
        # Borders of blocks' inputs, and what they stand for, by node and number of the output. What
        # nobody can pass to a block again is not kept.
        self._entries: dict[tuple[Any, int], _Entry] = {}
        self._anchor = torch.zeros((), device="cpu", requires_grad=True)
        self._is_between = False

    @property
    def number(self) -> int:
        return len(self._segments) - 1

    @property
    def next_block(self) -> int:
        """Number of the block that the forward is in or about to enter."""
        return max(0, self.number - 1)

    def _begin(self) -> None:
        self._segments.append(_Segment(next_sequence_number()))
        self._entries = {k: (ref, b) for k, (ref, b) in self._entries.items() if ref() is not None}

    def enter(self, inputs: Any) -> Any:
        """Return a block's nested ``inputs`` with borders for what earlier segments made."""
        if self.number == 0:
            self._begin()
        else:
            self._is_between = False
            if function_modes()[-1:] == [self]:  # else the model entered another one
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return self._replace(inputs, self._entries) if torch.is_grad_enabled() else inputs

    def leave(self, output: Any) -> Any:
        """Return a block's nested ``output`` as borders. The next segment begins."""
        if torch.is_grad_enabled():
            self.close([t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)])
        self._begin()
        if torch.is_grad_enabled():
            output = self._replace(output, {})
        self._is_between = True
        self.__enter__()  # type: ignore[no-untyped-call]
        return output

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = (tuple(args), dict(kwargs or {}))
        if self._is_between and func not in METADATA_READS and torch.is_grad_enabled():
            given = self._replace(given, self._entries)
        return func(*given[0], **given[1])

    def close(self, results: Iterable[Tensor]) -> None:
        """Search the graph of the segment under way from its ``results`` on."""
        nodes = [t.grad_fn for t in results if t.grad_fn is not None]
        self._search(self.number, [n for n in nodes if not self._is_earlier(n, self.number)])

    def _replace(self, inputs: Any, borders: dict[tuple[Any, int], _Entry]) -> Any:
        """Replace what earlier segments made in nested ``inputs`` by ``borders``, or new ones."""

        def replace(tensor: Tensor) -> Tensor:
            node = tensor.grad_fn
            if node is None or isinstance(node, _BORDER) or not self._is_earlier(node, self.number):
                return tensor
            key = (node, tensor.output_nr)
            if key not in borders:
                number = self._number_of(node)
                self._search(number, [node])
                gradient = _Gradient(self._anchor)
                self._segments[number].sources.append((get_gradient_edge(tensor), gradient))
                border = _Border.apply(self._anchor, tensor.detach(), gradient)  # type: ignore[no-untyped-call]
                borders[key] = weakref.ref(tensor), border
            return borders[key][1]

        return pytree.tree_map_only(Tensor, replace, inputs)

    def _number_of(self, node: Any) -> int:
        """Number of the segment that made ``node``."""
        starts = [segment.start for segment in self._segments]
        return bisect_right(starts, sequence_number(node)) - 1

    def _is_earlier(self, node: Any, number: int) -> bool:
        return sequence_number(node) < self._segments[number].start

    def _search(self, number: int, nodes: list[Any]) -> None:
        """Note borders and parameters in the graph of segment ``number`` from ``nodes`` on."""
        segment = self._segments[number]
        seen, left = set(nodes), list(nodes)
        while left:
            node = left.pop()
            if isinstance(node, AccumulateGrad):
                segment.params[id(node.variable)] = node.variable
            elif isinstance(node, _BORDER):
                if node.gradient.anchor is not self._anchor:
                    raise SegmentCrossing(None)
                segment.borders[node] = node.gradient
            elif self._is_earlier(node, number):
                raise SegmentCrossing(self._number_of(node))
            else:
                for following, _ in node.next_functions:
                    if following is not None and following not in seen:
                        seen.add(following)
                        left.append(following)

    # --------------------------------------------------------------- backward

    def params(self, number: int) -> dict[int, Tensor]:
        return self._segments[number].params

    def needs_backward(self, number: int) -> bool:
        """Whether a tensor that segment ``number`` made has a gradient so far."""
        return any(gradient.grad is not None for _, gradient in self._segments[number].sources)

    def prefetch(self, number: int) -> None:
        """Begin to fetch the partial gradients that the backward of segment ``number`` needs."""
        self._partial.prefetch(self._micro_batch, self._segments[number].params)

    def backward(self, number: int, loss: Tensor | None = None) -> None:
        """Go backward through one segment, later ones first. Its graph is freed."""
        segment = self._segments[number]
        self._segments[number] = _Segment(segment.start)
        self._entries.clear()  # the forward has ended
        roots: list[Any] = [] if loss is None else [loss]
        grads: list[Tensor | None] = [None] * len(roots)
        for edge, gradient in segment.sources:
            if gradient.grad is not None:
                roots.append(edge)
                grads.append(gradient.grad)
        if not roots:
            return
        for node, gradient in segment.borders.items():  # [Note: one order of sums]
            if gradient.grad is not None:
                roots.append(GradientEdge(node, 0))
                grads.append(gradient.grad)
        for key, param in segment.params.items():
            if (grad := self._partial.get(self._micro_batch, key)) is not None:
                roots.append(get_gradient_edge(param))
                grads.append(grad)
        torch.autograd.backward(roots, grads)
