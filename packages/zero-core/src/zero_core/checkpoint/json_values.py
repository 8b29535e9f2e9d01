"""JSON forms of a checkpoint's values that are not slices of parameters. Nothing is pickled.

- Client and scheduler states (`encode`): numbers, strings, lists, mappings and small tensors.
- Whole optimizer states (`flatten`): also dtypes, and tensors of any size. The structure is stored
  in the manifest, and the tensors in a file. A tensor subclass (for example torchao's quantized
  states) is stored as its inner tensors, by ``__tensor_flatten__``. It is restored only if its
  class is among torch's safe globals (`torch.serialization.add_safe_globals`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from zero_core.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

MAX_NUMEL = 65536  # elements of the largest tensor that `encode` accepts
_TENSOR, _TUPLE = "__tensor__", "__tuple__"


def encode(value: Any, where: str, advice: str = "leave it out") -> Any:
    """Return ``value`` as JSON. `decode` returns mappings as dict or Counter, and CPU tensors."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    import torch

    if isinstance(value, torch.Tensor):
        is_dense = value.layout is torch.strided and not value.is_quantized
        if value.numel() > MAX_NUMEL or value.is_complex() or not is_dense:
            raise CheckpointError(
                f"{where} is a tensor of shape {tuple(value.shape)}, {value.dtype} and "
                f"{value.layout}: beside the model, a checkpoint keeps real, dense tensors of up "
                f"to {MAX_NUMEL} elements. Make it a buffer of the module, or save it to a file of "
                "its own"
            )
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, list(value.shape), value.detach().reshape(-1).tolist()]}
    if isinstance(value, list | tuple):
        rows = [encode(v, f"{where}[{index}]", advice) for index, v in enumerate(value)]
        return rows if isinstance(value, list) else {_TUPLE: rows}
    if isinstance(value, Mapping):
        items = [
            [encode(k, where, advice), encode(v, f"{where}.{k}", advice)] for k, v in value.items()
        ]
        if isinstance(value, Counter):  # MultiStepLR keeps its milestones in a Counter
            return {"__counter__": items}
        if all(isinstance(k, str) and not k.startswith("__") for k in value):
            return dict(items)
        return {"__mapping__": items}
    raise CheckpointError(
        f"{where} is a {type(value).__name__} ({value!r:.60}), and a checkpoint keeps JSON and "
        f"small tensors: {advice}, or give it as numbers, strings, lists and mappings"
    )


def decode(value: Any) -> Any:
    try:
        return _decode(value)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointCorruptError(
            f"a value beside the model is not what was written: {error!r:.300}"
        ) from error


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(_decode(v) for v in value[_TUPLE])
    if value.keys() == {"__counter__"}:
        return Counter({_decode(k): _decode(v) for k, v in value["__counter__"]})
    if value.keys() == {"__mapping__"}:
        return {_decode(k): _decode(v) for k, v in value["__mapping__"]}
    if value.keys() == {_TENSOR}:
        import torch

        dtype, shape, values = value[_TENSOR]
        if len(values) > MAX_NUMEL or math.prod(shape) != len(values) or min(shape, default=0) < 0:
            raise ValueError(f"{len(values)} values of a tensor of shape {shape}")
        return torch.tensor(values, dtype=getattr(torch, dtype)).reshape(shape)
    return {k: _decode(v) for k, v in value.items()}


def flatten(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON, and add its tensors, copied to the CPU, to ``tensors`` by name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    import torch

    from zero_core._torch import inner_tensors

    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        tensors[where] = value.detach().cpu().clone().contiguous()
        return {_TENSOR: where}
    found = inner_tensors(value) if isinstance(value, torch.Tensor) else None
    if found is not None:
        inner, context = found
        return {
            "__wrapped__": _path_of(type(value)),
            "inner": {k: flatten(inner[k], f"{where}/{k}", tensors) for k in inner},
            "context": flatten(context, f"{where}/context", tensors),
            "size": list(value.size()),
            "stride": list(value.stride()),
        }
    if isinstance(value, list | tuple):
        rows = [flatten(item, f"{where}/{i}", tensors) for i, item in enumerate(value)]
        return rows if isinstance(value, list) else {_TUPLE: rows}
    if isinstance(value, Mapping):
        return {
            "__items__": [
                [flatten(key, where, tensors), flatten(item, f"{where}/{key}", tensors)]
                for key, item in value.items()
            ]
        }
    raise CheckpointError(
        f"the optimizer's state {where} is a {type(value).__qualname__}: a checkpoint keeps "
        "tensors, numbers, strings, lists and mappings of them. Have the optimizer keep these, or "
        "save without it: engine.export_safetensors()"
    )


def _is_key(value: Any) -> bool:
    """Whether `restore` turns ``value`` into a scalar or a tuple of scalars, as keys are."""
    if isinstance(value, dict):
        rows = value.get(_TUPLE)
        return len(value) == 1 and isinstance(rows, list) and all(map(_is_key, rows))
    return not isinstance(value, list)


def restore(value: Any, read: Callable[[str], object], classes: set[str] | None = None) -> Any:
    """Restore a value from the result of `flatten`. Raise CheckpointCorruptError for other forms.

    ``read`` returns a tensor by its name. If ``classes`` is given, tensor subclasses are not
    instantiated, and their class paths are added to ``classes`` instead.
    """
    match value:
        case list():
            return [restore(item, read, classes) for item in value]
        case None | bool() | int() | float() | str():
            return value
        case {"__dtype__": str(name), **rest} if not rest:
            import torch

            if isinstance(dtype := getattr(torch, name, None), torch.dtype):
                return dtype
        case {"__tensor__": str(name), **rest} if not rest:
            with suppress(KeyError):
                return read(name)
        case {"__tuple__": list(rows), **rest} if not rest:
            return tuple(restore(rows, read, classes))
        case {"__items__": list(rows), **rest} if not rest:
            if all(isinstance(row, list) and len(row) == 2 and _is_key(row[0]) for row in rows):
                return dict(restore(rows, read, classes))
        case {
            "__wrapped__": str(path),
            "inner": dict(wrapped),
            "context": context,
            "size": list(size),
            "stride": list(stride),
            **rest,
        } if not rest and all(type(n) is int and n >= 0 for n in (*size, *stride)):
            inner = {name: restore(item, read, classes) for name, item in wrapped.items()}
            own = restore(context, read, classes)
            if classes is not None:
                return classes.add(path)
            import torch

            parts = inner, own, torch.Size(size), tuple(stride)
            return safe_class(path).__tensor_unflatten__(*parts)
    raise CheckpointCorruptError(f"{value!r:.200} is no state of an optimizer that was saved")


def find_classes(value: Any, tensors: Mapping[str, object]) -> set[str]:
    """Check a state as `restore` does. Return the class paths of its tensor subclasses."""
    found = set[str]()
    restore(value, tensors.__getitem__, found)
    return found


def safe_class(path: str) -> Any:
    from torch import Tensor
    from torch.serialization import get_safe_globals

    for known in get_safe_globals():
        found = known[0] if isinstance(known, tuple) else known
        if isinstance(found, type) and issubclass(found, Tensor) and _path_of(found) == path:
            return found
    raise CheckpointError(
        f"the optimizer's states are tensors of class {path}, which is not known to be safe here: "
        "import the package that defines it before loading; for a class of your own call "
        "torch.serialization.add_safe_globals([...])"
    )


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
