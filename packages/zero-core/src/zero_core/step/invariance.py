"""Search for what in a model depends on more than its micro-batch, for ``world_size_invariant``.

At another world size a rank has computed other micro-batches before the one at hand. So a
micro-batch is computed twice from the same state, once more after another one, and by every rank:
the outputs of all modules and the gradients of all parameters must have the same bits.
"""

from __future__ import annotations

import ctypes
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zero_core._torch import is_in_backward, pytree
from zero_core.comm.control import ControlGroup
from zero_core.optim.train_state import TrainState
from zero_core.runtime.runtime import Runtime
from zero_core.step.seeds import MicroBatchSeeds


class Trained(Protocol):
    """An engine, as far as the search calls it."""

    @property
    def module(self) -> nn.Module: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, loss: Tensor) -> None: ...


class _Result(NamedTuple):
    """An output of a module or a gradient of a parameter: its name, and a checksum of its bits."""

    name: str
    checksum: int


class InvarianceCheck:
    """Names the first module that breaks ``world_size_invariant``."""

    def __init__(
        self,
        engine: Trained,
        runtime: Runtime,
        train: TrainState,
        control: ControlGroup,
        seeds: MicroBatchSeeds,
    ) -> None:
        self._engine = engine
        self._module = engine.module
        self._runtime = runtime
        self._train = train
        self._control = control
        self._seeds = seeds

    def run(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
        """Return a line for each kind of dependence, none if nothing was found.

        Every rank must call it, with the same two micro-batches. Buffers, gradients and the host's
        random numbers are left as they were, and nothing is updated.
        """
        buffers = {name: b.detach().clone() for name, b in self._module.named_buffers()}
        drawn = random.getstate(), torch.get_rng_state()
        found = []
        try:
            with self._seeds.suspended():
                once = self._compute(first)
                found += self._changed_buffers(buffers)
                self._restore(buffers, drawn[0])
                again = self._compute(first)
                found += _compare(once, again, "is not deterministic: computed twice")
                self._restore(buffers, drawn[0])
                self._compute(second)
                after = self._compute(first)
                why = "depends on what was computed before: after another one"
                of_history, of_rank = _compare(once, after, why), self._compare_ranks(once)
                if once == again:  # else each of them only shows it once more
                    found += [*of_history, *of_rank]
        finally:
            self._restore(buffers, drawn[0])
            torch.set_rng_state(drawn[1])
        return found

    def _compute(self, batch: Mapping[str, Any]) -> list[_Result]:
        """Run forward and backward of a micro-batch, the first one of the step, and drop them."""
        found: list[_Result] = []
        self._seeds.seed(0)
        with self._train.trial():
            with self._recorded(found):
                output = self._engine(**batch)
                floats = [t for t in _tensors(output) if t.is_floating_point()]
                self._engine.backward(torch.stack([t.float().sum() for t in floats]).sum())
            self._runtime.discard()
        return found

    @contextmanager
    def _recorded(self, found: list[_Result]) -> Iterator[None]:
        """Record all modules' outputs and all parameters' gradients, in order of execution."""
        handles = []
        for name, module in self._module.named_modules():
            hook = _output_hook(name, found)
            handles.append(module.register_forward_hook(hook))
        for name, param in self._module.named_parameters():
            if param.requires_grad:
                hook = _gradient_hook(name, found)
                handles.append(param.register_hook(hook))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _changed_buffers(self, before: Mapping[str, Tensor]) -> list[str]:
        now = dict(self._module.named_buffers())
        names = [name for name, value in before.items() if not torch.equal(now[name], value)]
        owners = Counter(name.rpartition(".")[0] for name in names)
        return [
            f"{_describe(self._module, owner)} changes its buffers in forward: at each world size "
            "rank 0 sees other micro-batches, and its buffers are used"
            for owner in owners
        ]

    def _restore(self, buffers: Mapping[str, Tensor], drawn: tuple[Any, ...]) -> None:
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                buffer.copy_(buffers[name])
        random.setstate(drawn)

    def _compare_ranks(self, own: Sequence[_Result]) -> list[str]:
        """Compare with the results of all ranks. Every rank must call it."""
        text = "\n".join(f"{checksum} {name}" for name, checksum in own)
        for rank, row in enumerate(self._control.gather_bytes(text.encode())):
            pairs = [line.split(" ", 1) for line in row.decode().splitlines()]
            theirs = [_Result(name, int(checksum)) for checksum, name in pairs]
            found = _compare(own, theirs, f"depends on the rank: on rank {rank}")
            if found:
                return found
        return []


def _compare(expected: Sequence[_Result], found: Sequence[_Result], why: str) -> list[str]:
    """Return a line about the first result that differs, if there is one."""
    for one, other in zip(expected, found, strict=False):
        if one.name != other.name:
            return [f"{one.name} {why}, {other.name} came in its place"]
        if one.checksum != other.checksum:
            return [f"{one.name} {why}, the same micro-batch gives other bits"]
    if len(expected) != len(found):
        longer = max(expected, found, key=len)
        return [f"{longer[min(len(expected), len(found))].name} {why}, it was left out"]
    return []


def _describe(module: nn.Module, name: str) -> str:
    kind = type(module.get_submodule(name)).__name__
    return f"{name} ({kind})" if name else f"the model ({kind})"


def _output_hook(name: str, found: list[_Result]) -> Any:
    def record(module: nn.Module, args: Any, output: Any) -> None:
        if not is_in_backward():
            where = f"{name or 'the model'} ({type(module).__name__})"
            found.append(_Result(where, _checksum(_tensors(output))))

    return record


def _gradient_hook(name: str, found: list[_Result]) -> Any:
    def record(grad: Tensor) -> None:
        found.append(_Result(f"the gradient of {name}", _checksum([grad])))

    return record


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _checksum(tensors: Sequence[Tensor]) -> int:
    """Return the CRC-32 of the bits of ``tensors``."""
    crc = 0
    for tensor in tensors:
        values = tensor.detach().contiguous().cpu()
        if values.numel():
            content = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
            crc = zlib.crc32(content, crc)
    return crc
