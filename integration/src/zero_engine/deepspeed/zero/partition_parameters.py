"""`Init` and `GatheredParameters`: models whose parameters are sharded over the ranks.

Before there is an engine, a parameter that was made within `Init` is *partitioned*: see
[Note: partitioned parameters] in `zero_engine.deepspeed.zero.partitioned`. Afterwards it belongs to
an engine. It keeps its shape throughout. A read while it is sharded gives NaN, where DeepSpeed's
parameter has no elements. Constructors of torch are left as they are. Parameters are cast when they
are partitioned if a dtype is given here. Otherwise the engine casts them, and its master weights
keep the precision that a cast would have lost.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_core import ShardedModel, engine_of
from zero_core.init.deferred import is_recorded_innermost
from zero_core.layout.discovery import note_reader
from zero_engine.deepspeed.accelerator import get_accelerator as get_accelerator
from zero_engine.deepspeed.distributed import init_distributed
from zero_engine.deepspeed.errors import NotServedError
from zero_engine.deepspeed.zero.partitioned import gathered_params, is_partitioned, value_of
from zero_engine.deepspeed.zero.partitioned_init import Made, partition_module, partitioned_init

_log = logging.getLogger(__name__)
_orig_torch_arange = torch.arange
_ids = itertools.count()


class ZeroParamType(enum.Enum):
    """State of a parameter's memory, under DeepSpeed's names."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether a parameter holds its value, as far as `GatheredParameters` says."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], dtype: torch.dtype, target_device: Any = None
) -> Callable[..., Tensor]:
    """Wrap ``fn`` so that floating results are in ``dtype``. transformers replaces it.

    `Init` wraps no constructor with it: what it makes keeps its dtype until it is partitioned.
    """

    def construct(*args: Any, **kwargs: Any) -> Tensor:
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        return made.to(dtype) if made.is_floating_point() else made

    return construct


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that ``module`` reads ``parameter`` in its forward, before the engine is made.

    Raises:
        NotServedError: an engine has the parameter already, and it isn't one of ``module``'s own.
    """
    if any(parameter is own for own in module.parameters()):
        return
    if engine_of(parameter) is not None:
        raise NotServedError(
            "zero.register_external_parameter() after initialize()",
            "call it in the module's __init__, or read the parameter within "
            "zero.GatheredParameters",
        )
    note_reader(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take back `register_external_parameter`.

    Raises:
        RuntimeError: it was not registered.
    """
    if not note_reader(module, parameter, is_reader=False):
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is not registered as an external one "
            f"of this {type(module).__name__}"
        )


def is_zero_param(parameter: object) -> bool:
    """Whether it was made within `Init`, or belongs to an engine of stage 3."""
    return isinstance(parameter, nn.Parameter) and "ds_id" in vars(parameter)


def describe(params: Iterable[nn.Parameter]) -> None:
    """Give sharded ``params`` the attributes by which scripts know them (``ds_id``, ...)."""
    for param in params:
        if not is_zero_param(param):
            vars(param).update(
                ds_id=next(_ids),
                ds_status=ZeroParamStatus.NOT_AVAILABLE,
                ds_param_type=ZeroParamType.PARTITIONED,
                ds_persist=False,
                ds_active_sub_modules=set(),
            )
        vars(param).update(ds_shape=param.shape, ds_numel=param.numel())


class Init:
    """A context that makes modules without memory, and partitions their parameters at its end.

    See `partitioned_init`. Every rank must enter it. torch.distributed is started if it isn't yet.
    One within another counts as part of it. But if the outer one has made nothing yet, it leaves
    all to the inner one: transformers enters one of its own, and loads values after it.
    """

    _active: ClassVar[Init | None] = None

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: dist.ProcessGroup | None = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: dist.ProcessGroup | None = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        """Prepare the context. With ``module``, shard the parameters that it has, at once.

        Args:
            module: a module that has values already; rank 0's count.
            data_parallel_group: the ranks to share among; default: ``mpu``'s, or all.
            mem_efficient_linear: nothing to do: the engine keeps no gathered weight for backward.
            remote_device, pin_memory: shards lie in host memory until there is an engine.
            config_dict_or_path, config: nothing here depends on it: the engine reads it.
            enabled: False: it does nothing.
            dtype: what floating parameters are cast to; default: the engine casts them.
            mpu: an object that knows the data-parallel group.
            zero_param_parallel_group: secondary shards are the engine's.
            zero_quantized_weights, zero_quantized_nontrainable_weights: the engine's too; values
                are exact before.
            sequence_data_parallel_group, param_swapper, tensor_overrides: not served.

        Raises:
            NotServedError: for one of the last three.
        """
        for name, value in (
            ("sequence_data_parallel_group", sequence_data_parallel_group),
            ("param_swapper", param_swapper),
            ("tensor_overrides", tensor_overrides),
        ):
            if enabled and value is not None:
                raise NotServedError(f"zero.Init({name}=...)", "leave it out")
        if remote_device == "nvme" and enabled:
            _log.info("zero.Init(remote_device='nvme'): in host memory until there is an engine")
        self._is_enabled = enabled
        self._dtype = dtype
        group = mpu.get_data_parallel_group() if mpu is not None else None
        self._group = data_parallel_group if data_parallel_group is not None else group
        self._recorder = ExitStack()
        self._made: Made | None = None
        if enabled:
            init_distributed()
            if module is not None:
                describe(partition_module(module, self._group, dtype=dtype))

    @classmethod
    def is_active(cls) -> bool:
        return cls._active is not None

    def __enter__(self) -> None:
        if not self._is_enabled:
            return
        outer = Init._active
        has_made = outer is None or outer._made is None or outer._made.modules
        if outer is not None and not has_made and is_recorded_innermost():
            outer.__exit__(None, None, None)
        if Init._active is None:
            Init._active = self
            context = partitioned_init(self._group, dtype=self._dtype)
            self._made = self._recorder.enter_context(context)

    def __exit__(self, *error: Any) -> None:
        if Init._active is self:
            Init._active = None
            assert self._made is not None, "it was entered"
            self._recorder.__exit__(*error)
            describe(self._made.params)


class GatheredParameters:
    """A context in which sharded parameters hold their whole values, on every rank.

    For parameters that no engine has yet, see `gathered_params`. For an engine's, see
    `zero_core.Engine.gathered`: there changes reach the master weights, too. Anything else (None,
    buffers, ordinary parameters) is left alone.

    Every rank must enter it, with the same parameters, at stages 0 to 2 too: changes of the
    modifier rank are sent to the others there as well, and a rank that enters alone waits for them
    until the process group's timeout. So not within ``if rank == 0``; but within it, for the code
    that one rank alone is to run.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """Prepare.

        Args:
            params: a parameter, or an iterable of them.
            modifier_rank: whose changes count; by default they are read only, and changes of
                those that no engine has are lost.
            fwd_module: also calls `register_external_parameter` with it, before there is an engine.
            enabled: False: it does nothing.
        """
        given = [params] if isinstance(params, Tensor) or params is None else list(params)
        unique = {id(p): p for p in given if isinstance(p, nn.Parameter)} if enabled else {}
        self._params = list(unique.values())
        self._modifier_rank = modifier_rank
        self._stack = ExitStack()
        if fwd_module is not None:
            for param in self._params:
                if engine_of(param) is None:
                    register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        partitioned = [p for p in self._params if value_of(p) is not None]
        if Init.is_active():
            self._check_recorded(partitioned)
            return
        describe(partitioned)  # a copy is new
        with ExitStack() as stack:
            stack.callback(describe, partitioned)  # a shape may have changed
            stack.enter_context(gathered_params(partitioned, modifier_rank=self._modifier_rank))
            for engine, own in _by_engine(self._params):
                if self._modifier_rank is not None or engine.config.zero_optimization.stage == 3:
                    gathered = engine.gathered(params=own, modifier_rank=self._modifier_rank)
                    stack.enter_context(gathered)
            stack.enter_context(_available(self._params))
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        stack, self._stack = self._stack, ExitStack()
        stack.__exit__(*error)

    def _check_recorded(self, partitioned: list[nn.Parameter]) -> None:
        """Check the use within `Init`, where nothing is sharded yet and rank 0's changes count."""
        if any(is_partitioned(p) for p in partitioned) or self._modifier_rank not in (None, 0):
            raise NotServedError(
                f"zero.GatheredParameters(modifier_rank={self._modifier_rank}) within zero.Init "
                f"(of {len(partitioned)} parameters from an earlier zero.Init)",
                "leave zero.Init first",
            )


def _by_engine(params: Iterable[nn.Parameter]) -> list[tuple[ShardedModel, list[nn.Parameter]]]:
    """Parameters that engines own, by engine, in an order that is the same on every rank."""
    found: dict[int, tuple[ShardedModel, dict[str, nn.Parameter]]] = {}
    for param in params:
        engine = engine_of(param)
        if engine is not None:
            name = engine.owns(param)
            assert name is not None, "it was found by it"
            found.setdefault(id(engine), (engine, {}))[1][name] = param
    return [(engine, [own[name] for name in sorted(own)]) for engine, own in found.values()]


@contextmanager
def _available(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Mark the sharded ones among ``params`` as holding their values."""
    before = [(p, p.ds_status) for p in params if is_zero_param(p)]  # type: ignore[attr-defined]
    for param, _ in before:
        param.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for param, status in before:
            param.ds_status = status  # type: ignore[attr-defined]


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Gather the model that an engine trains, to generate with."""
    inner = model.module
    assert isinstance(inner, nn.Module), "model is an engine"
    with GatheredParameters(inner.parameters()):
        yield inner
