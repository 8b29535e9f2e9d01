"""`Init` and `GatheredParameters`: models whose parameters are sharded over the ranks.

Before there is an engine, a parameter that was made within `Init` is *partitioned*: see [Note:
partitioned parameters] in `zero_engine.deepspeed.zero.partitioned`. Afterwards an engine owns it. A
partitioned parameter keeps its shape and reads as NaN, where DeepSpeed's has no elements.

With a dtype, or a configuration that enables bf16 or fp16, parameters are cast when they are
partitioned, and master weights start from the rounded values, as in DeepSpeed. Otherwise the engine
casts them, and its master weights keep the full precision.

[Note: attributes of sharded parameters]
Scripts recognise a sharded parameter by attributes (``ds_id``, ``ds_status``, ...).
While a stage-3 engine owns a parameter, its class is `ShardedParameter`, whose properties ask the
engine. A parameter of a subclass keeps that class, because operators dispatch on it, and the class
gets descriptors of these names. Unlike DeepSpeed's, a sharded parameter keeps its shape.

[Note: parameters in an autograd.Function]
In DeepSpeed, ``ctx.saved_tensors`` of an ``autograd.Function`` holds the parameter objects with
these attributes. Here a saved parameter is unpacked as a new tensor, a view of its gathered unit.
While there is a stage-3 engine, ``ctx.saved_tensors`` is therefore a property: tensors with the
address and shape of a parameter get that parameter's attributes. The class ``torch.Tensor`` does
not get the attributes, because torch.compile would see them on every tensor.

Non-reentrant `torch.utils.checkpoint` keeps the arguments of the recomputed function, which its
frame's ``get_inputs`` returns. That method is replaced in the same way. In torch releases without
``get_inputs``, checkpoints use an ``autograd.Function``, which the property covers.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import _CheckpointFrame

from zero_core import ShardedModel, adapters, engine_of
from zero_engine.deepspeed.accelerator import get_accelerator as get_accelerator
from zero_engine.deepspeed.comm import init_distributed
from zero_engine.deepspeed.config.reader import load
from zero_engine.deepspeed.errors import NotServedError
from zero_engine.deepspeed.utils import groups
from zero_engine.deepspeed.zero import partitioned

_log = logging.getLogger(__name__)
_orig_torch_arange = torch.arange
SANITY_CHECKS = "ds_enable_sanity_checks"
"""Attribute that makes `GatheredParameters` refuse edits that would be lost."""
ASKED = ("ds_status", "ds_tensor", "partition_numel")
"""Attributes of `ShardedParameter` whose values the engine computes."""

_ids = itertools.count()


class ZeroParamType(enum.Enum):
    """Kind of a parameter's memory, under DeepSpeed's names."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether a parameter holds its value on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ShardedParameter(adapters.EngineParameter):
    """Class of a parameter while a stage-3 engine owns it."""

    @property
    def ds_status(self) -> ZeroParamStatus:
        """AVAILABLE while the parameter holds its value, as in its unit's forward."""
        is_here = _engine(self, "ds_status").holds_value(self)
        return ZeroParamStatus.AVAILABLE if is_here else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self) -> Tensor:
        """This rank's elements, 1-D, in the parameter's dtype, read only. May be empty."""
        return _engine(self, "ds_tensor").own_part(self).detach()

    def partition_numel(self) -> int:
        return self.ds_tensor.numel()


def is_zero_param(parameter: object) -> bool:
    """Whether ``parameter`` was made within `Init` or belongs to a stage-3 engine."""
    return isinstance(parameter, nn.Parameter) and "ds_id" in vars(parameter)


def describe(
    params: Iterable[nn.Parameter],
    *,
    has_checks: bool | None = None,
    secondary: dist.ProcessGroup | None = None,
) -> None:
    """Set the attributes by which scripts recognise sharded ``params`` (``ds_id``, ...).

    ``has_checks`` is the value of `SANITY_CHECKS`; None does not set it. ``secondary`` is the group
    of ranks that share hpZ's secondary shards.
    """
    for param in params:
        if not is_zero_param(param):
            vars(param).update(
                ds_id=next(_ids),
                ds_status=ZeroParamStatus.NOT_AVAILABLE,
                ds_param_type=ZeroParamType.PARTITIONED,
                ds_persist=False,
                ds_active_sub_modules=set(),
                ds_zero_param_process_group=secondary,
            )
        vars(param).update(ds_shape=param.shape, ds_numel=param.numel())
        if has_checks is not None:
            vars(param)[SANITY_CHECKS] = has_checks


def describe_engine(engine: ShardedModel) -> None:
    """Set `NAMES` on a stage-3 engine's parameters, and on saved tensors that are unpacked."""
    params = list(engine.module.parameters())
    describe(params, has_checks=engine.config.zero_optimization.enable_sanity_checks)
    for param in params:
        own = adapters.own_class(param)
        if own is nn.Parameter or issubclass(own, adapters.EngineParameter):
            adapters.use_class([param], adapters.derive(ShardedParameter, own))
            engine.remove_at_end([AtEnd(partial(adapters.use_class, [param], own))])
        else:  # a subclass that a user wrote stays the parameter's class
            engine.remove_at_end([_OwnClass(param)])
    engine.remove_at_end([_Saved(params)])


class AtEnd:
    """Clean-up function in the form that an engine's ``remove_at_end`` takes."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def remove(self) -> None:
        self._undo()


class _OwnClass:
    """Descriptors of the names `ASKED`, set on a parameter's user-written class."""

    _num_params: ClassVar[Counter[type[nn.Parameter]]] = Counter()

    def __init__(self, param: nn.Parameter) -> None:
        self._class = adapters.own_class(param)
        self._attributes = vars(param)
        self._status = self._attributes.pop("ds_status")
        if not self._num_params[self._class]:
            for name in ASKED:
                setattr(self._class, name, _Asked(name))
        self._num_params[self._class] += 1

    def remove(self) -> None:
        self._attributes["ds_status"] = self._status
        self._num_params[self._class] -= 1
        if not self._num_params[self._class]:
            for name in ASKED:
                delattr(self._class, name)


class _Asked:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, param: nn.Parameter | None, owner: type[nn.Parameter]) -> Any:
        return self if param is None else vars(ShardedParameter)[self._name].__get__(param)


def _engine(param: nn.Parameter, name: str) -> ShardedModel:
    engine = engine_of(param)
    if engine is None:
        raise AttributeError(f"the parameter belongs to no engine and has no {name!r}")
    return engine


NAMES = (
    *("ds_active_sub_modules", "ds_id", "ds_numel", "ds_param_type", "ds_persist", "ds_shape"),
    *ASKED,
)
"""Attributes that `_described` copies from a parameter to its gathered value."""

_engines: list[_Saved] = []
_get_inputs: Any = vars(_CheckpointFrame).get("get_inputs")


class _Saved:
    """Parameters of one engine by shape. Patches torch's unpacking while any such object exists."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for param in params:
            if param.numel():
                self.by_shape.setdefault(param.shape, []).append(param)
        if not _engines:
            BackwardCFunction.saved_tensors = property(  # type: ignore[assignment]
                lambda context: _described(super(BackwardCFunction, context).saved_tensors)  # type: ignore[misc]
            )
            if _get_inputs is not None:
                _CheckpointFrame.get_inputs = (  # type: ignore[method-assign]
                    lambda frame: _described(_get_inputs(frame))
                )
        _engines.append(self)

    def remove(self) -> None:
        _engines.remove(self)
        if not _engines:
            del BackwardCFunction.saved_tensors
            if _get_inputs is not None:
                _CheckpointFrame.get_inputs = _get_inputs  # type: ignore[method-assign]


def _described(unpacked: Any) -> Any:
    for tensor in unpacked:
        if type(tensor) is not Tensor:
            continue
        alike = [param for engine in _engines for param in engine.by_shape.get(tensor.shape, ())]
        here = (param for param in alike if not adapters.is_refused(param))
        param = next((param for param in here if param.data_ptr() == tensor.data_ptr()), None)
        if param is not None:
            vars(tensor).update({name: getattr(param, name) for name in NAMES})
            vars(tensor)["ds_status"] = ZeroParamStatus.AVAILABLE
    return unpacked


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], dtype: torch.dtype, target_device: Any = None
) -> Callable[..., Tensor]:
    """Wrap ``fn`` to return floating tensors in ``dtype``. transformers patches this name."""

    def construct(*args: Any, **kwargs: Any) -> Tensor:
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        return made.to(dtype) if made.is_floating_point() else made

    return construct


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare, before the engine is made, that ``module`` reads ``parameter`` in its forward."""
    if any(parameter is own for own in module.parameters()):
        return
    if engine_of(parameter) is not None:
        raise NotServedError(
            "zero.register_external_parameter() after initialize()",
            "call it in the module's __init__, or read the parameter within "
            "zero.GatheredParameters",
        )
    adapters.note_reader(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    if not adapters.note_reader(module, parameter, is_reader=False):
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is not registered as an external one "
            f"of this {type(module).__name__}"
        )


class Init:
    """A context that makes modules without memory, and partitions their parameters at its end.

    See `partitioned_init`. Every rank must enter it. It starts torch.distributed if necessary. A
    nested context is part of the outer one, unless the outer one has made no module yet: then the
    inner one replaces it.
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
        """Prepare the context. With ``module``, partition its parameters at once.

        Args:
            module: a module that has values, of which rank 0's are used.
            data_parallel_group: ranks that share the parameters. Default: ``mpu``'s group, or all
                ranks.
            config_dict_or_path, config: a configuration. Its bf16 or fp16 is the default of
                ``dtype``, and its ``zero_optimization.enable_sanity_checks`` applies to the
                parameters.
            enabled: False makes the context do nothing.
            dtype: dtype of floating parameters. Default: ``config``'s, if it enables bf16 or fp16.
            sequence_data_parallel_group, param_swapper, tensor_overrides: refused with
                NotServedError.

        The remaining arguments have no effect.
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
        given = config if config is not None else config_dict_or_path
        found = load(given) if enabled and given is not None else {}
        if any(_value_of(found, block, "enabled") is True for block in ("bf16", "bfloat16")):
            dtype = dtype or torch.bfloat16
        elif _value_of(found, "fp16", "enabled") is True:
            dtype = dtype or torch.float16
        self._dtype = dtype
        self._has_checks = _value_of(found, "zero_optimization", "enable_sanity_checks") is True
        group = mpu.get_data_parallel_group() if mpu is not None else None
        self._group = data_parallel_group if data_parallel_group is not None else group
        self._num_secondary = _value_of(found, "zero_optimization", "zero_hpz_partition_size")
        self._recorder = ExitStack()
        self._made: partitioned.Made | None = None
        if enabled:
            init_distributed()
            if module is not None:
                self._describe(partitioned.partition_module(module, self._group, dtype=self._dtype))

    def _describe(self, params: Iterable[nn.Parameter]) -> None:
        world, size = groups.get_data_parallel_group(), groups.get_data_parallel_world_size()
        is_secondary = self._group in (None, world) and self._num_secondary == size > 1
        secondary = world if is_secondary else None  # hpZ's secondary shards span all ranks
        describe(params, has_checks=self._has_checks, secondary=secondary)

    def __enter__(self) -> None:
        if not self._is_enabled:
            return
        outer = Init._active
        has_made = outer is None or outer._made is None or outer._made.modules
        if outer is not None and not has_made and adapters.is_recorded_innermost():
            outer.__exit__(None, None, None)
        if Init._active is None:
            context = partitioned.partitioned_init(self._group, dtype=self._dtype)
            self._made = self._recorder.enter_context(context)
            Init._active = self  # set last, because a failed __enter__ has no __exit__

    def __exit__(self, *error: Any) -> None:
        if Init._active is self:
            Init._active = None
            assert self._made is not None, "it was entered"
            self._recorder.__exit__(*error)
            self._describe(self._made.params)


@contextmanager
def suspended_init() -> Iterator[None]:
    """Leave an active `Init` during this context, and enter it again afterwards."""
    active = Init._active
    if active is None or not adapters.is_recorded_innermost():
        yield
        return
    active.__exit__(None, None, None)
    try:
        yield
    finally:
        active.__enter__()


class GatheredParameters:
    """A context in which sharded parameters hold their whole values, on every rank.

    `gathered_params` gathers parameters without an engine. `zero_core.Engine.gathered` gathers
    an engine's parameters, and also copies changes to the master weights. Other objects (None,
    buffers, ordinary parameters) are ignored.

    Every rank must enter it with the same parameters, at every stage: a rank that enters alone may
    wait until the process group's timeout. Code for one rank (``if rank == 0``) belongs inside the
    context.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """Prepare the context.

        Args:
            params: a parameter, or an iterable of parameters.
            modifier_rank: rank whose changes are kept. By default parameters are read only: without
                an engine changes are lost, and with an engine of stage 3 a change raises at the
                end, on the rank that made it. With ``enable_sanity_checks`` a change in place
                raises on every rank.
            fwd_module: module for `register_external_parameter`, if there is no engine yet.
            enabled: False makes the context do nothing.
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
        rank = self._modifier_rank
        found = [p for p in self._params if partitioned.value_of(p) is not None]
        if Init._active is not None:
            # Parameters made within `Init` hold whole values until its end. Rank 0's are kept.
            if any(map(partitioned.is_partitioned, found)) or rank not in (None, 0):
                raise NotServedError(
                    f"zero.GatheredParameters(modifier_rank={rank}) within "
                    f"zero.Init (of {len(found)} parameters from an earlier zero.Init)",
                    "leave zero.Init first",
                )
            return
        describe(found)  # deep copies have no ds_id yet
        with ExitStack() as stack:
            stack.callback(describe, found)  # the body may have changed the shape
            stack.enter_context(partitioned.gathered_params(found, modifier_rank=rank))
            others = [
                p for p in self._params if partitioned.value_of(p) is None and engine_of(p) is None
            ]
            stored = [component.tensor for p in others for component in adapters.stored_tensors(p)]
            stack.enter_context(adapters.gathered_slices(stored, modifier_rank=rank))
            owned: dict[int, tuple[ShardedModel, list[nn.Parameter]]] = {}
            for param in self._params:
                if (owner := engine_of(param)) is not None:
                    owned.setdefault(id(owner), (owner, []))[1].append(param)
            for engine, params in owned.values():
                if rank is not None or engine.config.zero_optimization.stage == 3:
                    stack.enter_context(engine.gathered(params=params, modifier_rank=rank))
            for param in self._params:
                own = vars(param)
                # The class of engines' parameters computes ds_status.
                if "ds_status" in own and not isinstance(param, ShardedParameter):
                    stack.callback(own.update, ds_status=own["ds_status"])
                    own["ds_status"] = ZeroParamStatus.AVAILABLE
            checked = [p for p in self._params if vars(p).get(SANITY_CHECKS)]
            if checked and rank is None:
                stack.enter_context(_unedited(checked))
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        stack, self._stack = self._stack, ExitStack()
        stack.__exit__(*error)


@contextmanager
def _unedited(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Raise at the end if a rank has changed ``params`` in place. Every rank must enter it."""
    before = [(p.data_ptr(), p._version) for p in params]
    yield
    is_edited = before != [(p.data_ptr(), p._version) for p in params]
    engine, value = engine_of(params[0]), partitioned.value_of(params[0])
    owner = value if engine is None else engine.sharded_state
    assert owner is not None, "only sharded parameters are checked"
    found = owner.control.gather(torch.tensor([int(is_edited)])).tolist()
    if any(found):
        ranks = [rank for rank, is_own in enumerate(found) if is_own]
        raise RuntimeError(
            f"in-place modification of a sharded parameter on ranks {ranks}, within "
            "zero.GatheredParameters(modifier_rank=None), which only reads: give modifier_rank the "
            "rank whose changes count"
        )


def _value_of(config: Mapping[str, Any], block: str, key: str) -> Any:
    found = config.get(block)
    return found.get(key) if isinstance(found, Mapping) else None


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Gather the parameters of ``model``, an engine, to generate with them. Yields ``model``."""
    # foreign: TRL passes DeepSpeed's engine or ours. Below stage 3 there is no such attribute.
    offload = getattr(model.optimizer, "parameter_offload", None)
    with GatheredParameters(model.parameters()):
        if offload is not None:
            offload.forward_hooks = []
        try:
            yield model
        finally:
            if offload is not None:
                offload.register(offload.module)


@contextmanager
def sharded_loading() -> Iterator[None]:
    """Shard each parameter that a module is given in this context, as soon as it is complete.

    Quantized parameters are put in slices: see [Note: values in slices] in
    `zero_core.quantization`. Others become partitioned. Quantizers set a module's weight more than
    once, so a parameter counts as complete when another module is given a parameter. A rank
    therefore holds its shards and one module. A module's forward refuses values in slices. Every
    rank must enter it, and load the same values.
    """
    ranks = adapters.find_ranks(None, None)
    control = ranks.connect()
    waiting: dict[tuple[nn.Module, str], None] = {}

    @torch.no_grad()
    def shard_waiting() -> None:
        for module, name in waiting:
            param = module._parameters.get(name)
            if param is None or param.is_meta:
                continue
            if partitioned.can_partition(param) and not adapters.is_storage_dtype(param.dtype):
                value = partitioned.PartitionedValue(control, ranks.device)
                value.keep(param)
                partitioned.partition(param, value)
                describe([param])
            else:
                adapters.put_in_slices(
                    [component.tensor for component in adapters.stored_tensors(param)], control
                )
                if _check_whole not in module._forward_pre_hooks.values():
                    module.register_forward_pre_hook(_check_whole)
        waiting.clear()
        adapters.release_free_pages()

    def note(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if any(other is not module for other, _ in waiting):
            shard_waiting()
        waiting[module, name] = None

    handle = register_module_parameter_registration_hook(note)
    try:
        yield
        shard_waiting()
    finally:
        handle.remove()


def _check_whole(module: nn.Module, args: Any) -> None:
    """Refuse a forward with values in slices. The hook removes itself if there is an engine."""
    if torch.compiler.is_compiling():
        return
    params = {name: p for name, p in module._parameters.items() if p is not None}
    for name, param in params.items():
        if any(component.tensor in adapters.slices for component in adapters.stored_tensors(param)):
            raise RuntimeError(
                f"forward of a {type(module).__name__} whose quantized {name} is sharded over the "
                "ranks, as it was loaded under a configuration of stage 3, and no engine has it: "
                "call the engine of deepspeed.initialize(), or compute within "
                "deepspeed.zero.GatheredParameters(model.parameters()), or load the model before "
                "HfDeepSpeedConfig or TrainingArguments(deepspeed=...) is made"
            )
    if any(engine_of(param) is not None for param in params.values()):
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _check_whole]:
            del hooks[key]


class TiledLinear(nn.Module):
    """`torch.nn.Linear` whose input and output may be split along the last dimension.

    The layer itself is not split: this engine gathers whole units, where DeepSpeed gathers one tile
    at a time. ``combine_out_splits=False`` returns a list of parts. ``linear_cls`` makes the layer,
    with ``**kwargs``. ``init_linear`` is a layer to copy the values from. Raises RuntimeError if a
    number of parts is not within [1, features].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., Any] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= splits <= features:
                raise RuntimeError(f"TiledLinear: {name} = {splits}, expected 1 to {features}")
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.linear = linear_cls(in_features, out_features, bias=bias, **kwargs)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Return the output, [..., out_features], or the list of its parts."""
        if self.input_is_already_split and self.in_splits > 1:
            if len(input_) != self.in_splits:
                raise ValueError(
                    f"TiledLinear: the input has {len(input_)} parts, expected {self.in_splits}"
                )
            input_ = torch.cat(list(input_), dim=-1)
        output = self.linear(input_)
        return output if self.combine_out_splits else self._split(output)

    def _split(self, output: Any) -> list[Any]:
        return list(output.tensor_split(self.out_splits, dim=-1))

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy rank 0's weight and bias of ``other``, sharded or not. Every rank must call it."""
        own: nn.Linear = self.linear
        if other.weight.shape != own.weight.shape:
            raise ValueError(
                f"copy_params_from: expected a weight of {tuple(own.weight.shape)}, "
                f"found {tuple(other.weight.shape)}"
            )
        if (own.bias is None) != (other.bias is None):
            raise ValueError("copy_params_from: one of the two layers has a bias")
        with (
            GatheredParameters(other.parameters(recurse=False)),
            GatheredParameters(own.parameters(recurse=False), modifier_rank=0),
        ):
            own.weight.copy_(other.weight)
            if own.bias is not None:
                own.bias.copy_(other.bias)


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` for layers that return ``(output, bias)``, such as Megatron's."""

    def _split(self, output: Any) -> list[Any]:
        product, bias = output
        biases = [bias] * self.out_splits if bias is None else super()._split(bias)
        return list(zip(super()._split(product), biases, strict=True))
