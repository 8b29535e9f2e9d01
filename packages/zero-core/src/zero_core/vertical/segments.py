"""Autograd's graph of one micro-batch, cut at the inputs and outputs of blocks.

[Note: segments]
A *segment* is the computation from the end of one block to the end of the next: the code between
the blocks, and the second block. The first segment, the *prologue*, ends where the first block
begins. The last one, the *epilogue*, follows all blocks and includes the loss. Autograd can run
backward through one segment only if nothing in its graph leads to an earlier segment. So each
tensor that requires a gradient and is used in a later segment is replaced by a *border* tensor. A
border shares the memory but has a separate graph node, `_Border`, where backward stops and stores
the gradient. Borders replace the outputs of a block, and any inputs of blocks or of operations
between blocks that an earlier segment computed, such as a position bias or the input of a residual
connection. A tensor that enters a block in another way (through an attribute, say) is detected,
because its node is older than the segment. This raises `SegmentCrossing`.

[Note: one order of sums]
Autograd sums the gradients of a tensor in the order in which they become ready, last use first. A
border used by several segments, or a parameter (a tied weight), gets parts of its gradient in
several backwards. Each of these backwards starts with the previous sum as an additional root.
Autograd adds further parts to that sum one by one. So the sum is bit-identical to the sum of a
single backward.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from zero_core._torch import (
    METADATA_READS,
    AccumulateGrad,
    autocast_depth,
    cast_param,
    function_modes,
    next_sequence_number,
    pytree,
    sequence_number,
)
from zero_core.runtime.host_inputs import HostCopy, HostInputs


class PartialGrads:
    """Gradients of parameters that several segments use, by micro-batch and id of the parameter.

    A *turn* is the backward of one micro-batch through one segment. With ``copies``, gradients on
    the device are copied to the host at the end of each turn. The end of the next turn frees their
    device memory.
    """

    def __init__(self, num_micro_batches: int, copies: HostInputs | None) -> None:
        self._grads: list[dict[int, Tensor | HostCopy]] = [{} for _ in range(num_micro_batches)]
        self._copies = copies

    def put(self, number: int, param: int, grad: Tensor) -> None:
        self._grads[number][param] = grad

    def discard(self, number: int, param: int) -> None:
        self._grads[number].pop(param, None)

    def get(self, number: int, param: int) -> Tensor | None:
        found = self._grads[number].get(param)
        if isinstance(found, HostCopy):
            found = self._grads[number][param] = found.copies.take(found)
        return found

    def take_all(self, number: int) -> Iterator[tuple[int, Tensor]]:
        """Yield and drop the gradients of micro-batch ``number``, with their parameter ids."""
        for param in list(self._grads[number]):
            grad = self.get(number, param)
            assert grad is not None
            self.discard(number, param)
            yield param, grad

    def prefetch(self, number: int, params: Iterable[int]) -> None:
        """Start to copy gradients of ``params`` from the host back to the device."""
        for param in params if self._copies is not None else ():
            if isinstance(found := self._grads[number].get(param), HostCopy):
                found.copies.fetch(found)

    def end_turn(self, number: int) -> None:
        """With ``copies``, call `settle`, and start to copy the turn's gradients to the host."""
        if self._copies is None:
            return
        self.settle()
        grads = self._grads[number]
        for param, grad in grads.items():
            if isinstance(grad, Tensor):
                stored = self._copies.store(grad, len(self._grads))
                grads[param] = grad if stored is None else stored

    def settle(self) -> None:
        """Drop device gradients that are being copied to the host: see `HostInputs.free`."""
        for stored in chain.from_iterable(grads.values() for grads in self._grads):
            if isinstance(stored, HostCopy):
                stored.copies.free(stored)


class SegmentCrossing(Exception):
    """Raised if a segment's graph leads to an earlier segment or to another micro-batch."""

    def __init__(self, segment: int | None) -> None:
        super().__init__(segment)
        self.segment = segment  # number of the earlier segment, None for another micro-batch


@dataclass(eq=False, slots=True)
class _Gradient:
    """A border's gradient so far, and the ``anchor`` tensor that identifies its micro-batch."""

    anchor: Tensor
    grad: Tensor | None = None


class _Border(torch.autograd.Function):
    """Function that returns the values as a tensor at which backward stops and stores gradients."""

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
"""A tensor by weak reference, and its border."""


@dataclass(eq=False)
class _Segment:
    """One segment: its outputs, where backward starts, and the leaves that receive gradients."""

    start: int  # lower bound of its nodes' `sequence_number`
    # Outputs that were replaced by borders, as edges, which do not keep the values' memory.
    sources: list[tuple[GradientEdge, _Gradient]] = field(default_factory=list)
    borders: dict[Any, _Gradient] = field(default_factory=dict)
    params: dict[int, Tensor] = field(default_factory=dict)  # parameters in its graph, by id


class Segments(TorchFunctionMode):
    """The segments of one micro-batch. The prologue is number 0, block n (0, 1, ...) is n + 1.

    Between and after the blocks of a forward this object is an active `TorchFunctionMode`, which
    replaces operands computed by earlier segments with borders.
    """

    def __init__(self, partial: PartialGrads, micro_batch: int) -> None:
        """``partial`` stores parameter gradients to which several segments add."""
        super().__init__()
        self._partial = partial
        self._micro_batch = micro_batch
        self._segments = [_Segment(0)]
        # By node and output number: a tensor that was replaced, by weak reference, and its border.
        # Entries of dead tensors are removed.
        self._entries: dict[tuple[Any, int], _Entry] = {}
        self._anchor = torch.zeros((), device="cpu", requires_grad=True)
        self._is_between = False
        # By id of a parameter: first node of its cast. Autocast's cache shares it within a forward.
        self._casts: dict[int, Any] = {}
        self._shares_casts = False  # whether a block was entered with autocast's cache active
        self._pauses: list[int] = []  # `next_sequence_number` at the start of each block

    @property
    def number(self) -> int:
        return len(self._segments) - 1

    def _begin(self) -> None:
        self._segments.append(_Segment(next_sequence_number()))
        self._entries = {k: (ref, b) for k, (ref, b) in self._entries.items() if ref() is not None}

    def enter(self, inputs: Any) -> Any:
        """Begin a block. Replace earlier segments' tensors in its nested ``inputs`` by borders."""
        self._shares_casts |= autocast_depth() > 0 and torch.is_autocast_cache_enabled()
        self._pauses.append(next_sequence_number())
        if self.number == 0:
            self._begin()
        else:
            self._is_between = False
            if function_modes()[-1:] == [self]:  # skipped if the model entered another mode
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return self._replace(inputs, self._entries) if torch.is_grad_enabled() else inputs

    def leave(self, output: Any) -> Any:
        """End a block, and begin the next segment. Return the nested ``output`` as borders."""
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
        """Record borders and parameters that the current segment used for ``results``."""
        nodes = [t.grad_fn for t in results if t.grad_fn is not None]
        self._search(self.number, [n for n in nodes if not self._is_earlier(n, self.number)])

    def _replace(self, inputs: Any, borders: dict[tuple[Any, int], _Entry]) -> Any:
        """Replace earlier segments' tensors in nested ``inputs`` by existing or new ``borders``."""

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
        starts = [segment.start for segment in self._segments]
        return bisect_right(starts, sequence_number(node)) - 1

    def _is_earlier(self, node: Any, number: int) -> bool:
        return sequence_number(node) < self._segments[number].start

    def _search(self, number: int, nodes: list[Any]) -> None:
        """Record borders and parameters to which ``nodes`` lead, or raise SegmentCrossing."""
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
                if self._shares_casts and (param := cast_param(node)) is not None:
                    first = self._casts.setdefault(id(param), node)
                    at = [bisect_right(self._pauses, sequence_number(n)) for n in (first, node)]
                    if at[0] != at[1]:  # a pause in between has cleared autocast's cache
                        raise SegmentCrossing(self._number_of(first))
                for following, _ in node.next_functions:
                    if following is not None and following not in seen:
                        seen.add(following)
                        left.append(following)

    def params(self, number: int) -> dict[int, Tensor]:
        return self._segments[number].params

    def needs_backward(self, number: int) -> bool:
        """Return whether a border that replaced an output of segment ``number`` has a gradient."""
        return any(gradient.grad is not None for _, gradient in self._segments[number].sources)

    def prefetch(self, number: int) -> None:
        """Start to fetch the partial gradients that the backward of segment ``number`` needs."""
        self._partial.prefetch(self._micro_batch, self._segments[number].params)

    def backward(self, number: int, loss: Tensor | None = None) -> None:
        """Run backward through a segment, after that of all later segments. Frees its graph."""
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
