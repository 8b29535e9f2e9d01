"""Optimizer states that are whole: what the manifest has of them, beside their tensors in a file.

Such a state is whatever an optimizer keeps for a parameter: numbers, tensors of any shape, lists
and mappings of them. Its structure is JSON. A tensor subclass (torchao's quantized states, say) is
stored as the tensors that it wraps, by ``__tensor_flatten__``; it is restored only if its class is
one that torch.load would accept (`torch.serialization.add_safe_globals`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_safe_globals

from zero_core._torch import inner_tensors
from zero_core.checkpoint.files import Reader
from zero_core.errors import CheckpointCorruptError, CheckpointError

_TENSOR, _WRAPPED, _DTYPE = "__tensor__", "__wrapped__", "__dtype__"
_TUPLE, _ITEMS = "__tuple__", "__items__"


def flatten(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON, and add its tensors, copied to the CPU, to ``tensors``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, Tensor) and type(value) in (Tensor, torch.nn.Parameter):
        tensors[where] = value.detach().cpu().clone().contiguous()
        return {_TENSOR: where}
    found = inner_tensors(value) if isinstance(value, Tensor) else None
    if found is not None:
        inner, context = found
        return {
            _WRAPPED: _path_of(type(value)),
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
            _ITEMS: [
                [flatten(key, where, tensors), flatten(item, f"{where}/{key}", tensors)]
                for key, item in value.items()
            ]
        }
    raise CheckpointError(
        f"the optimizer's state {where} is a {type(value).__qualname__}: a checkpoint keeps "
        "tensors, numbers, strings, lists and mappings of them. Have the optimizer keep these, or "
        "save without it: engine.export_safetensors()"
    )


def check(value: Any, tensors: Collection[str]) -> None:
    """Refuse what `restore` could not restore from a file with these ``tensors``."""
    if isinstance(value, list):
        for item in value:
            check(item, tensors)
        return
    if not isinstance(value, dict):
        return
    match value:
        case {"__dtype__": str(name)} if len(value) == 1:
            is_known = isinstance(getattr(torch, name, None), torch.dtype)
        case {"__tensor__": str(name)} if len(value) == 1:
            is_known = name in tensors
        case {"__tuple__": list(rows)} if len(value) == 1:
            is_known = True
            check(rows, tensors)
        case {"__items__": list(rows)} if len(value) == 1:
            is_known = all(
                isinstance(row, list) and len(row) == 2 and _is_key(row[0]) for row in rows
            )
            check([row[1] for row in rows] if is_known else [], tensors)
        case {
            "__wrapped__": str(),
            "inner": dict(inner),
            "context": context,
            "size": list(size),
            "stride": list(stride),
        } if len(value) == 5:
            is_known = all(type(n) is int and n >= 0 for n in (*size, *stride))
            check([*inner.values(), context], tensors)
        case _:
            is_known = False
    if not is_known:
        raise CheckpointCorruptError(f"{value!r:.200} is no state of an optimizer that was saved")


def check_classes(value: Any) -> None:
    """Refuse what `check` has passed where a tensor's class is not known to be safe here."""
    if isinstance(value, dict):
        if _WRAPPED in value:
            _safe_class(value[_WRAPPED])
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        check_classes(item)


def _is_key(value: Any) -> bool:
    """Whether ``value`` restores to a key of a dict."""
    if isinstance(value, dict):
        rows = value.get(_TUPLE)
        return len(value) == 1 and isinstance(rows, list) and all(map(_is_key, rows))
    return not isinstance(value, list)


def restore(value: Any, reader: Reader, file: str) -> Any:
    """Return the argument of `flatten`, which `check` has passed, with the tensors of ``file``."""
    if isinstance(value, list):
        return [restore(item, reader, file) for item in value]
    if not isinstance(value, dict):
        return value
    if _DTYPE in value:
        return getattr(torch, value[_DTYPE])
    if _TENSOR in value:
        return reader.read_tensor(file, value[_TENSOR])
    if _TUPLE in value:
        return tuple(restore(value[_TUPLE], reader, file))
    if _WRAPPED in value:
        inner = {name: restore(item, reader, file) for name, item in value["inner"].items()}
        return _safe_class(value[_WRAPPED]).__tensor_unflatten__(
            inner,
            restore(value["context"], reader, file),
            torch.Size(value["size"]),
            tuple(value["stride"]),
        )
    return {restore(k, reader, file): restore(item, reader, file) for k, item in value[_ITEMS]}


def _safe_class(path: str) -> Any:
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
