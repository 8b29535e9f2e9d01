"""The engine: the model, callable as before, and the three verbs of a training step.

    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()

``step`` is called after every micro-step and acts at accumulation boundaries. What happens in
between is in `zero_core.flow` (gather and reduce) and in the state tier (update).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_core import checkpoint, ending, export, progress
from zero_core.access import StateAccess
from zero_core.accumulation import Accumulation
from zero_core.buffers import BufferSync
from zero_core.collectives import ControlGroup
from zero_core.comm_report import Meter
from zero_core.config import Config
from zero_core.early import EarlyUpdates
from zero_core.facts import GradientFacts
from zero_core.flow import Flow
from zero_core.freezing import FrozenGuard
from zero_core.gathering import Gathering
from zero_core.layout import Layout
from zero_core.optimizer import EngineOptimizer
from zero_core.owners import names_by_id, refuse_stale_state_dicts, register
from zero_core.precision import LossScaler, cast_floats, clip_factor
from zero_core.protocols import Collectives, StateTier
from zero_core.schedule import Schedule
from zero_core.segment_grads import SegmentGrads
from zero_core.state import ShardedState
from zero_core.traffic import Traffic
from zero_core.unit import Unit

__all__ = ["Engine"]


class Engine:
    """A model under training; made by `zero_core.build`.

    Attributes:
        module: the model itself.
        config: the resolved configuration.
        layout: where every element lives.
        optimizer: real ``param_groups``; schedulers may be attached to it.
        states: master weights, gradients and moments by name, to read and to set.
        lr_scheduler: stepped at each optimizer step that is taken, or None.
        global_steps: optimizer steps so far, skipped ones included.
        skipped_steps: steps skipped because a gradient was not finite.
        device: where the model is computed.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        config: Config,
        layout: Layout,
        units: Sequence[Unit],
        unit_modules: Sequence[nn.Module],
        tier: StateTier,
        collectives: Collectives,
        control: ControlGroup,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Schedule | None,
        device: torch.device,
        stage: int,
        memory_report: Callable[[], dict[str, int]],
        meter: Meter,
    ) -> None:
        """Called by `zero_core.build`."""
        self.module = module
        self.config = config
        self.layout = layout
        self.lr_scheduler = lr_scheduler
        self.global_steps = 0
        self.skipped_steps = 0
        self.device = device
        self.optimizer = EngineOptimizer(
            optimizer, update=self._update, discard_grads=self._discard_grads
        )
        self._accumulation = Accumulation(config.gradient_accumulation_steps)
        self._tier = tier
        self._control = control
        self._memory_report = memory_report
        self._meter = meter
        self._scaler = LossScaler(config.fp16)
        self._is_scaled = False
        self._grad_norm: float | None = None
        self._clip_factor = 1.0  # of the calls of clip_grad_norm_ for this step
        self._grad_scale = 1.0
        self._active: list[int] = []
        self._collectives = collectives
        self._forget_values = getattr(collectives, "forget_values", lambda: None)
        self._pieces = layout.pieces(control.rank, is_sharded=stage >= 1)
        self._local_starts = layout.local_starts(is_sharded=stage >= 1)
        self._flow = Flow(
            units,
            collectives,
            rank=control.rank,
            has_sharded_params=stage >= 3,
            is_reduced_per_backward=control.world_size > 1,
            on_reduced=self._on_reduced,
            on_backward=self._check_backward,
            on_broken_backward=self._restart_accumulation,
            is_boundary=self._accumulation.is_boundary,
        )
        self._facts = GradientFacts(layout, control, self._flow, device, meter)
        self._early = EarlyUpdates(config, layout, tier, self._pieces, self._flow)
        self._state = ShardedState(
            module=module,
            layout=layout,
            values=tuple(v for unit in units for v in unit.values),
            tier=tier,
            control=control,
            pieces=self._pieces,
            optimizer=f"{type(optimizer).__name__} with {len(optimizer.param_groups)} groups",
        )
        self.states = StateAccess(
            self._state,
            self._facts,
            complete_gradient=self._complete_gradient,
            replace_gradient=self._replace_gradient,
            values_changed=self._on_replaced,
        )
        self._gathering = Gathering(self._flow, self._state, self._on_replaced)
        self._names = names_by_id(layout, self._state.values)
        self._flow.tier = tier
        self._flow.attach(unit_modules, config.activation_checkpointing)
        self._buffers = BufferSync(module, control, should_sync=lambda: self._flow.should_sync)
        if config.broadcast_buffers:
            self._buffers.attach()
        self._frozen = FrozenGuard(layout, self._state.values)
        self._hooks = [self._frozen.watch(module), *refuse_stale_state_dicts(module, self._flow)]
        register(self)

    # ------------------------------------------------------------------ using

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; floating inputs are cast to the compute dtype, if one is set."""
        args, kwargs = cast_floats((args, kwargs), self.config.compute_dtype)
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Engine:
        """As `torch.nn.Module.train`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """As `torch.nn.Module.eval`."""
        return self.train(False)

    def scale(self, loss: Tensor, *, over: int | None = None) -> Tensor:
        """``loss`` times the loss scale and over the micro-steps, for a plain backward.

        ``over`` is their number in this step, None the configuration's.
        """
        self._is_scaled = True
        if self._scaler.scale != 1.0:
            loss = loss * self._scaler.scale
        return self._accumulation.divide(loss, over)

    def backward(self, loss: Tensor, *, over: int | None = None, **kwargs: Any) -> None:
        """Backward of ``loss``, scaled and averaged over the micro-steps, as by `scale`.

        A plain ``loss.backward()`` works too, except with fp16; it doesn't divide by the
        accumulation steps. Every rank must run it; ``kwargs`` go to `torch.Tensor.backward`.
        """
        self.scale(loss, over=over).backward(**kwargs)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """End a micro-step; at an accumulation boundary, update the parameters.

        Every rank must call it. A step whose gradient is not finite on any rank is skipped on all.

        Raises:
            RuntimeError: called within ``no_sync``.
        """
        if not self.is_gradient_accumulation_boundary():
            self._end_micro_step()
            return
        if not self._flow.should_sync:
            raise RuntimeError("step() within no_sync(): step outside")
        self._decide()
        self.optimizer.overflow = not self._is_finite()
        if not self.optimizer.overflow:
            self.optimizer.engine_step()
            self._scaler.update(is_overflow=False)
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self._skip()
        self._forget_gradient()
        self.global_steps += 1
        self._meter.end_step()
        self._end_micro_step()
        progress.tell_progress(self)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-step is the last one of its step."""
        return self._accumulation.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether this micro-step, and each from now on, is the last one of its step.

        None: the count says, as at first. Every rank must call it, before the backward concerned.
        """
        self._accumulation.override = is_boundary

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last step's gradient, unscaled, before clipping; None before a step."""
        return self._grad_norm

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the gradient of the step to come by its p-norm; the norm that it had, unscaled.

        As `torch.nn.utils.clip_grad_norm_` over the whole model, between the last backward of a
        step and ``step``. ``gradient_clipping`` acts after it. Every rank must call it.

        Raises:
            RuntimeError: not at an accumulation boundary, or within ``no_sync``.
            ValueError: ``max_norm`` or ``norm_type`` is not positive.
        """
        if not (max_norm > 0.0 and norm_type > 0.0):
            raise ValueError(f"max_norm and norm_type must be > 0: {max_norm}, {norm_type}")
        norm = self._complete_gradient() * self._facts.p_norm(norm_type)
        self._clip_factor *= clip_factor(norm, max_norm)
        return norm

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward keeps gradients on the rank, unreduced, as in DDP.

        It saves a reduction per micro-step and takes the memory of the whole gradient. The last
        backward of a step usually runs outside; if not, ``step`` reduces.
        """
        before, self._flow.should_sync = self._flow.should_sync, False
        self._flow.hold_gradients()
        try:
            yield
        finally:
            self._flow.should_sync = before

    def gathered(
        self, *, modifier_rank: int | None = None, params: Iterable[nn.Parameter] | None = None
    ) -> AbstractContextManager[nn.Module]:
        """Within, every parameter, or each of ``params`` alone, holds its exact value.

        For reading; but what rank ``modifier_rank`` changes in place reaches all shards and master
        weights at the end. Every rank must enter it, with the same ones: of those that only read
        this is not checked, they would wait for each other. It takes the memory of what is gathered
        (of ``params``, and one unit at a time), on the modifier twice. It nests. Within its own
        forward or backward a unit has that one's values: with qwZ, quantized.

        Raises:
            ValueError: there is no such rank, or one of ``params`` is not this engine's.
            RankMismatchError: a change was announced with different parameters or ranks.
            RuntimeError: parameters are to be changed within a forward or backward.
        """
        if params is None:
            return self._gathering.all_params(modifier_rank)
        return self._gathering.some_params(params, modifier_rank)

    def publish(self) -> None:
        """Have the parameters hold the current values now, where each rank has room for them all.

        At stages 0 to 2 a step leaves it to the next forward; then ``module.state_dict()`` works on
        any rank alone. At stage 3 they rest as shards: see `gathered`. Every rank must call it.
        """
        self._gathering.publish()

    def owns(self, param: nn.Parameter) -> str | None:
        """The name of ``param``, its first one, if it is one of this engine's; else None."""
        return self._names.get(id(param))

    # ---------------------------------------------------------------- keeping

    def save_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        **options: bool,
    ) -> Path:
        """Write everything needed to go on, for any stage, world size, ratio and tier.

        Every rank must call it, at a step boundary; or ``drops_partial=True`` leaves out what a
        step has accumulated. ``client_state`` must be JSON; other ``options``: see
        `zero_core.checkpoint.save`. The previous checkpoint stays whole until the new one is.
        """
        self._early.check_none("save_checkpoint() between backward and step")
        self._accumulation.check_ended(or_dropped=options.pop("drops_partial", False))
        self._forget_values()
        return checkpoint.save(
            self._state,
            Path(directory),
            f"step-{self.global_steps}" if tag is None else tag,
            progress=progress.read_progress(self),
            client_state=client_state or {},
            **options,
        )

    def load_checkpoint(
        self, directory: str | Path, tag: str | None = None, *, without: Collection[str] = ()
    ) -> tuple[Path, dict[str, Any]]:
        """Restore what `save_checkpoint` wrote; its folder and the client state.

        Every rank must call it. Without ``tag`` the newest complete one is taken. What is
        ``without`` stays as it is: some of `zero_core.checkpoint.PARTS`.

        Raises:
            CheckpointError: there is none, or it belongs to another model.
            CheckpointCorruptError: its bytes are not what was written.
        """
        with self._rewriting():
            check = partial(progress.check_progress, self, without=without)
            found = checkpoint.load(self._state, Path(directory), tag, without=without, check=check)
            progress.restore_progress(self, found[1], without)
        return found[0], found[2]

    def _on_replaced(self) -> None:
        """Values were written from outside of a step, on all ranks."""
        self._flow.values_changed()
        self._forget_values()

    @contextmanager
    def _rewriting(self) -> Iterator[None]:
        """Within, values are written from outside; once they are, gradients so far are dropped."""
        self._flow.release_all()
        yield
        self._forget_gradient()
        self._accumulation.forget()
        self._on_replaced()

    def full_state_dict(
        self, *, dtype: torch.dtype | None = None, rank: int | None = None
    ) -> dict[str, Tensor]:
        """The whole model's state dict, on the CPU, on every rank or on ``rank`` alone.

        Values come from the master weights, in the compute dtype or in ``dtype``; tied names share
        a tensor. Every rank must call it.
        """
        return export.full_state_dict(self._state, dtype=dtype, rank=rank)

    def export_safetensors(
        self, directory: str | Path, *, dtype: torch.dtype | None = None
    ) -> Path:
        """Write ``model.safetensors`` (several and an index, if large) as Hugging Face reads it.

        Every rank must call it; rank 0 writes. Returns the folder.
        """
        return export.export_safetensors(self._state, Path(directory), dtype=dtype)

    def memory_report(self) -> dict[str, int]:
        """Bytes on this rank by kind, without activations and the state tier's own memory."""
        return self._memory_report()

    def comm_report(self) -> tuple[Traffic, ...]:
        """What this rank sent in the last step, by collective and link; empty before a step.

        Rows are those of ``plan().traffic``, without the host link, and Muon's gather, which a plan
        lacks. What is sent between two steps counts for the second. Only what goes through the
        engine's own collectives is seen.
        """
        return self._meter.report()

    def close(self) -> None:
        """Take the engine's hooks off, on this rank alone: it waits for no other.

        Parameters of whose current values other ranks have a part hold none then: at stage 3 and,
        after a step, at 1 and 2. `zero_core.give_back` ends an engine with all of them whole.
        """
        ending.close(self)

    # ------------------------------------------------------------------ facts

    @property
    def rank(self) -> int:
        """This rank within the data-parallel group."""
        return self._control.rank

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self._control.world_size

    @property
    def micro_steps(self) -> int:
        """Calls of ``step`` so far; after a load, as many as the steps so far would have."""
        return self._accumulation.micro_steps

    @property
    def loss_scale(self) -> float:
        """The factor on the loss; 1 without fp16."""
        return self._scaler.scale

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-step."""
        return self.config.train_micro_batch_size_per_gpu

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per step; may be set between two steps, on every rank."""
        return self._accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._accumulation.set_steps(steps)

    # ---------------------------------------------------------------- a step

    def _on_reduced(self, grads: SegmentGrads) -> None:
        """The gradient of one segment is complete: count it and hand it to the tier."""
        final = grads.finalize(self._collectives)
        self._facts.add(grads)
        grads.offered(self._tier.offer_grad(self._local_starts[grads.segment.index], final))
        self._early.update(grads, self.optimizer)

    def _check_backward(self) -> None:
        self._early.check_none("a further backward of the same step")
        if self.config.fp16.enabled and not self._is_scaled:
            raise RuntimeError(
                "fp16 needs the loss scale: engine.backward(), or engine.scale(loss)"
            )

    def _restart_accumulation(self) -> None:
        """A backward did not end: drop the gradients of the whole step, not a part of them."""
        self._accumulation.restart(f"rank {self.rank}: step {self.global_steps}")
        self._discard_grads()

    def _complete_gradient(self) -> float:
        """Have the gradient of the step reduced; what brings it to its scale, clipped so far."""
        if not self.is_gradient_accumulation_boundary() or not self._flow.should_sync:
            raise RuntimeError(
                "the gradient is not whole yet: call this outside no_sync(), between the last "
                "backward of a step and step()"
            )
        self._early.check_none("reading, setting or clipping gradients")
        self._facts.complete()
        return self._clip_factor / self._scaler.scale

    def _replace_gradient(self, grads: SegmentGrads, param: int) -> None:
        self._flow.fired.add(param)
        self._on_reduced(grads)

    def _decide(self) -> None:
        """Agree with all ranks on the gradient norm, its finiteness and the parameters used."""
        self._frozen.check()
        self._facts.complete()
        used = self._facts.used
        self._active = [i for i, p in enumerate(self._pieces) if used[p.param] > 0]
        self._grad_norm = self._facts.norm / self._scaler.scale
        clipped = self._grad_norm * self._clip_factor
        factor = self._clip_factor * clip_factor(clipped, self.config.gradient_clipping)
        self._grad_scale = factor / self._scaler.scale

    def _is_finite(self) -> bool:
        assert self._grad_norm is not None
        return math.isfinite(self._grad_norm) or not (
            self.config.check_grad_overflow or self.config.fp16.enabled
        )

    def _update(self, groups: Sequence[Mapping[str, Any]]) -> None:
        active = self._early.rest(self._active, self.optimizer)
        self._tier.step(groups, active, grad_scale=self._grad_scale)
        self._flow.values_changed()

    def _skip(self) -> None:
        self.skipped_steps += 1
        scale = self._scaler.scale
        self._scaler.update(is_overflow=True)
        getattr(self._collectives, "forget_errors", lambda: None)()
        progress.tell_skipped(self, self._facts.explain_nonfinite(), scale)

    def _discard_grads(self) -> None:
        self._early.check_none("dropping gradients")
        self._forget_gradient()

    def _forget_gradient(self) -> None:
        self._flow.discard()
        self._tier.discard_grads()
        self._facts.clear()
        self._early.clear()
        self._clip_factor = 1.0

    def _end_micro_step(self) -> None:
        self._accumulation.end_micro_step()
        self._is_scaled = False
