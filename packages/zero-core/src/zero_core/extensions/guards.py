"""Checks during training: changed models, repeated runs, differing replicas, unused parameters.

[Note: what a model may not do after build()]
The engine keeps the values of parameters in its own memory, and gradient hooks on the parameter
objects. It does not track a parameter that is replaced, added, or tied to another name later, nor
one whose memory is replaced (``module.double()``, ``param.data = ...``, ``param.set_()``). The next
forward with gradients, or the next step, raises an error. Allowed are ``requires_grad_`` of
trainable parameters, ``module.to`` of the same device and dtype, in-place writes within `gathered`,
wrappers around modules, new modules without parameters, and `torch.func.functional_call`.

[Note: trainable and frozen]
A parameter is *trainable* if it is in an optimizer group when the engine is built, and has a
floating-point dtype. It has a gradient, a master weight and optimizer state in the layout. Its
``requires_grad`` may be switched off and on between steps, equally on all ranks. While it is off, a
step does not change the parameter and its state, as torch's optimizers skip a parameter without
``.grad``. The parameter keeps its memory and is still gathered with its unit. All other parameters
are frozen permanently: they have only values, and unfreezing one is an error.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_core._torch import outside_graphs
from zero_core.comm.watch import count_ranks, join_few
from zero_core.config import Config
from zero_core.core.extension import EndedStep, Extension
from zero_core.core.facts import Facts
from zero_core.errors import ConfigError, RankMismatchError, UnusedParameterError
from zero_core.layout.discovery import plain_name
from zero_core.optim.train_state import TrainState
from zero_core.sharded.sharded_state import ShardedState
from zero_core.step.update import updates_in_backward

_log = logging.getLogger(__name__)
_NUM_COMPARED = 3  # previous micro-steps with which the rounds of a micro-step are compared
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ADVICE = (
    "Write values within engine.gathered(modifier_rank=...); to change the model itself, end the "
    "engine by engine.unwrap() and build another one"
)


class TrainingGuard(Extension):
    """Extension of every engine: the model is as at build(), and no micro-step has run twice.

    It also detects new buffers. A *round* is a backward, outside of ``no_sync``, of a forward that
    began after the previous backward. Several rounds in a micro-step are legal: two losses, each
    with a separate forward. But they also occur if a notebook is interrupted between backward and
    ``step`` and its lines run again: see `begin_backward`.
    """

    def __init__(self, state: ShardedState, train: TrainState) -> None:
        self._state = state
        self._train = train
        self._micro_step = self._drops = self._step = 0  # counts of ``train`` at the last round
        self._num_rounds = 0  # rounds of the current micro-step
        self._usual_rounds = 0.0  # most rounds of the newest micro-steps; 0: unknown, inf: warned
        self._rounds: list[int] = []  # of the newest micro-steps
        self._is_first_known = False
        self._reported = 0  # id of the error that an interpreter last reported
        names = state.param_names
        self._num_names = Counter(map(id, _named(state.module).values()))
        self._name_of = {key: name for key, name in names.items() if self._num_names[key]}
        trainable = set(map(id, state.trained_params))
        self._frozen = [p for p in state.module.parameters() if id(p) not in trainable]
        self._buffers: list[Any] = []  # modules, names and forms of the last step's buffers

    def watch(self) -> RemovableHandle:
        """Check the model before each forward with gradients, until the handle is removed."""
        self._remember_places()

        def hook(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                self._check(has_substitutes=True)

        return self._state.module.register_forward_pre_hook(outside_graphs(hook), prepend=True)

    def before_update(self, number: int) -> None:
        self._check(has_substitutes=False)

    def begin_backward(self, *, is_new: bool) -> None:
        """Warn once if the micro-step's gradient probably contains two runs of the same code.

        The reason is that the micro-step has more rounds than earlier ones. In the first micro-step
        that number is unknown: only an error that an interactive interpreter reported
        (``sys.last_value``) between two rounds is a reason.
        """
        if not is_new:
            return
        train = self._train
        if train.micro_steps != self._micro_step:
            self._micro_step = train.micro_steps
            self._end_rounds()
        if train.num_drops != self._drops:  # the earlier rounds add nothing to this gradient
            self._drops, self._num_rounds = train.num_drops, 0
        self._num_rounds += 1
        self._step = train.global_steps + 1
        if self._num_rounds <= self._usual_rounds:
            return
        reported, self._reported = self._reported, id(vars(sys).get("last_value"))
        if self._usual_rounds or (self._num_rounds > 1 and reported != self._reported):
            self._warn_of_rounds(
                "backward adds to the gradient of %d that no step() has taken: if the program was "
                "interrupted and began again, call engine.zero_grad() and run forward and backward "
                "again, or the step is too long",
                self._num_rounds - 1,
            )

    def _end_rounds(self) -> None:
        if not self._num_rounds or self._usual_rounds == math.inf:
            return
        before, self._num_rounds = [*self._rounds, self._num_rounds], 0
        self._rounds = before[-_NUM_COMPARED:]
        self._usual_rounds = max(self._rounds)
        if not self._is_first_known and len(before) == _NUM_COMPARED:
            self._is_first_known = True
            if before[0] > max(before[1:]):
                self._warn_of_rounds(
                    "the first micro-step added up %d backwards, those after it fewer: if the "
                    "program was interrupted and began again there, its step was too long. Build "
                    "the engine again from the first weights. engine.zero_grad() drops a gradient",
                    before[0],
                )

    def _warn_of_rounds(self, text: str, number: int) -> None:
        self._usual_rounds = math.inf
        place = (self._state.control.rank, self._step)
        _log.warning("rank %d, step %d: " + text + ". This is said once", *place, number)

    def stepped(self, ended: EndedStep) -> None:
        self._micro_step = self._train.micro_steps
        self._end_rounds()

    def fill(self, facts: Facts) -> None:
        buffers = [
            (module, key, None if b is None else (b.shape, b.dtype, b.device))
            for module in self._state.module.modules()
            for key, b in module._buffers.items()
        ]
        if buffers != self._buffers:
            self._buffers = buffers
            self._state.common_buffers.describe()  # the step compares them between ranks

    def _check(self, *, has_substitutes: bool) -> None:
        """Raise if a parameter was added, replaced, removed, tied, moved, written or unfrozen."""
        # Runs in each forward, so C code (`map`, `is_`) compares the modules' dictionaries.
        is_as_before = sum(map(len, self._places)) == len(self._entries)
        if not (is_as_before and all(map(is_, chain.from_iterable(self._places), self._entries))):
            self._check_names(has_substitutes=has_substitutes)
        for values in self._state.params:
            shown = values.shown
            if (position := shown.misplaced()) is not None:
                param = shown.params[position]
                expected = f"{shown.dtype_of(position)} on {values.device}"
                raise RuntimeError(
                    f"parameter {self._state.param_names[id(param)]} was given other memory after "
                    f"build() ({param.dtype} on {param.device}, {expected} expected), as by "
                    "module.to(), module.double(), param.data = ... or param.set_(): the engine "
                    f"would not follow it. Cast and move a model before build(). {_ADVICE}"
                )
            if (written := shown.written) is not None:
                shown.written = None
                raise RuntimeError(shown.refusal(written, is_write=True))
        for param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {self._name_of[id(param)]} requires a gradient now, but was in no "
                    "optimizer group when the engine was built: nothing would update it. Freeze it "
                    "again; or build the engine while it requires a gradient (or with an optimizer "
                    "over it), and freeze it after build() until it is to be trained"
                )

    def _remember_places(self) -> None:
        modules = list(self._state.module.modules())
        dicts: list[dict[str, Any]] = [m._parameters for m in modules]
        dicts += [m._modules for m in modules]
        self._places = [d.values() for d in dicts]  # views that reflect changes of the dicts
        self._entries = list(chain.from_iterable(self._places))

    def _check_names(self, *, has_substitutes: bool) -> None:
        named = _named(self._state.module)
        known = set(self._name_of.values())
        for name, param in named.items():
            if id(param) not in self._name_of:
                if has_substitutes and not isinstance(param, nn.Parameter):
                    continue
                what = "was replaced" if plain_name(name) in known else "was added to the model"
                raise RuntimeError(
                    f"parameter {name} {what} after build(): nothing would train or save it. "
                    f"{_ADVICE}"
                )
        num_names = Counter(map(id, named.values()))
        for key, name in self._name_of.items():
            if num_names[key] > self._num_names[key]:
                raise RuntimeError(
                    f"parameter {name} was tied to a further place after build(), where it would "
                    f"not be gathered. {_ADVICE}"
                )
            if not num_names[key] and not has_substitutes:
                raise RuntimeError(
                    f"parameter {name} was removed from the model after build(): nothing would "
                    f"train it, and it would still be saved. {_ADVICE}"
                )
        if len(num_names) == len(self._name_of):
            self._remember_places()  # only wrappers or modules without parameters changed


class ReplicaCheck(Extension):
    """Check that refuses a step if parameters differ between ranks, as after memory corruption.

    Used at stages 0 to 2. Ranks compare the sum of each parameter's values, viewed as integers. A
    change of a single bit changes the sum.
    """

    def __init__(self, state: ShardedState, config: Config) -> None:
        if updates_in_backward(config):
            raise ConfigError(
                "check_replicas_every: values are compared before the update, and units are "
                "updated in backward: set zero_optimization.offload_optimizer.update_in_backward "
                "to false"
            )
        self._state = state
        self._every = config.check_replicas_every

    @torch.no_grad()
    def before_update(self, number: int) -> None:
        """Compare the parameters of all ranks, every ``check_replicas_every`` steps."""
        state, control = self._state, self._state.control
        if number % self._every or control.world_size == 1:
            return
        held_by = {id(p): p for p in state.module.parameters()}
        params = [held_by[id(p)] for flat in state.params for p in flat.params if id(p) in held_by]
        sums = torch.stack(
            [p.detach().view(_INTEGERS[p.itemsize]).sum(dtype=torch.int64) for p in params]
        )
        held = torch.tensor([state.holds_value(param) for param in params], dtype=torch.int64)
        every_sum, every_held = (
            control.gather(own).view(control.world_size, -1) for own in (sums, held)
        )
        is_different = (every_sum != every_sum[0]).any(0) & every_held.bool().all(0)
        columns = is_different.nonzero().flatten().tolist()
        if columns:
            found = [
                f"{state.param_names[id(params[n])]}: {_odd_ranks(every_sum[:, n].tolist())}"
                for n in columns
            ]
            raise RankMismatchError(
                f"rank {control.rank}, step {number}: not updated, as values differ between ranks "
                f"({join_few(found)}): memory was corrupted, or a program wrote to it on "
                "one rank alone. Go on from a checkpoint, without the machine if it happens again"
            )


def _odd_ranks(sums: list[int]) -> str:
    """Name the ranks whose entry in ``sums`` (by rank) differs from the most frequent one."""
    (value, num), *others = Counter(sums).most_common()
    odd = [rank for rank, found in enumerate(sums) if found != value]
    if others and others[0][1] == num:
        return f"{count_ranks(range(len(sums)))} have no majority"
    return f"{count_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from the others"


class UnusedParameters(Extension):
    """Check that refuses a step in which a rank left a trainable parameter unused.

    Used at stages 1 and 2 with ``ignore_unused_parameters`` false. All ranks know how many ranks
    used each parameter, so all ranks raise. Ranks without any gradient (without data) do not count.
    """

    def __init__(self, state: ShardedState, facts: Facts, train: TrainState) -> None:
        self._state = state
        self._facts = facts
        self._train = train

    def agreed(self) -> None:
        state, facts = self._state, self._facts
        num_active, num_ranks = max(1, facts.counts("with gradient")[0]), facts.counts("used")
        missed = [
            f"{spec.name} on {num_active - num:.0f} of {num_active:.0f} ranks"
            for spec, num in zip(state.layout.params, num_ranks, strict=True)
            if num < num_active and spec.is_trainable
            if state.module.get_parameter(spec.name).requires_grad
        ]
        if missed:
            raise UnusedParameterError(
                f"rank {state.control.rank}, step {self._train.global_steps + 1}: {len(missed)} "
                f"trainable parameters got no gradient ({join_few(missed)}), and "
                "zero_optimization.ignore_unused_parameters is false: set it to true to leave them "
                "alone in such a step, or use every one in the loss"
            )


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))
