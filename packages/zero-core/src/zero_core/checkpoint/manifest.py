"""Manifest of a checkpoint: its file format, its types, and its consistency rules.

[Note: format version 2]
``manifest.json`` is one JSON object. Its last member ``sha256`` is the digest of all bytes before
that member, so the file verifies itself and stays readable as JSON. The manifest has the size of
each file and the CRC-32 of every chunk of ``chunk_bytes``. A reader of a range checks only the
chunks that it reads, and several ranks can share the check of a large file. A CRC-32 detects every
change of up to 32 consecutive bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zero_core.checkpoint import storage
from zero_core.checkpoint.safetensors_files import CHUNK_BYTES, DTYPES, KEYS, dtype_of, first_error
from zero_core.checkpoint.storage import Location, Staging, open_regular, size_of
from zero_core.errors import CheckpointCorruptError, CheckpointError
from zero_core.sharded import MASTER

if TYPE_CHECKING:
    import torch

    from zero_core.sharded.sharded_state import ShardedState

FORMAT = "zero-checkpoint"
VERSION = 2
MANIFEST = storage.MANIFEST
BUFFERS = "buffers.safetensors"
VALUE = "value"  # prefix of files of frozen parameters' values
WHOLE = "whole"  # prefix of files of whole optimizer states
RNG = "rng"  # prefix of files of random generators' states
_MAX_BYTES = 128 << 20  # limit of a manifest, enough for about 300,000 parameters
_MAX_RANKS = 1 << 20
_MAX_NUMEL = 1 << 60
_TAIL = re.compile(rb', "sha256": "([0-9a-f]{64})"}\Z')
_TAIL_BYTES = len(', "sha256": ""}') + 64

_Numel = Annotated[int, Field(ge=0, le=_MAX_NUMEL)]
_Crc = Annotated[int, Field(ge=0, lt=1 << 32)]
_Number = int | Annotated[float, Field(allow_inf_nan=True)]
"""Scalar of an optimizer state. It may be infinite or NaN if the training has diverged."""


def file_name(state: str, rank: int) -> str:
    return f"{state}-{rank:05d}.safetensors"


def slice_key(param: str) -> str:
    """Return the tensor name of a parameter's slice, for a state that some parameters lack."""
    return f"/{param}"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Param(_Strict):
    """A parameter, or a component of a quantized parameter."""

    name: str
    aliases: tuple[str, ...]  # other names of a tied parameter
    shape: Annotated[tuple[_Numel, ...], Field(max_length=64)]  # shape of the whole parameter
    dtype: str  # name of the compute dtype, for example "bfloat16"
    is_trainable: bool
    # Dimensions in memory order, slowest first, if that is not the order of the shape. Also set for
    # a component of a quantized parameter, which is saved as bytes.
    memory_order: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(KEYS[self.dtype])

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[KEYS[self.dtype]][1]


class SavedSegment(_Strict):
    """A segment: parameters in one flat buffer, each as ``(name, start, stop)``."""

    is_trainable: bool
    shard_numel: _Numel
    slots: tuple[tuple[str, _Numel, _Numel], ...]


class FileFacts(_Strict):
    """Size of a file and the CRC-32 of each chunk."""

    bytes: Annotated[int, Field(ge=0)]
    crc32: tuple[_Crc, ...]


class WholeState(_Strict):
    """Optimizer state of a whole parameter: see `zero_core.checkpoint.json_values`."""

    file: str
    state: Any


class Manifest(_Strict):
    """Content of a manifest. The constructor checks that it is consistent."""

    format: Literal["zero-checkpoint"]
    version: Literal[2]
    world_size: Annotated[int, Field(ge=1, le=_MAX_RANKS)]
    optimizer: str  # class and number of groups, as text
    states: tuple[str, ...]  # states of trained parameters, each with one file per rank
    params: tuple[Param, ...]
    segments: tuple[SavedSegment, ...]
    scalars: dict[str, dict[str, _Number]]  # scalars in the optimizer's state, by parameter
    whole_states: dict[str, WholeState] = {}  # optimizer states of whole parameters
    python_rng: tuple[tuple[int, tuple[int, ...], float | None], ...]
    files: dict[str, FileFacts]
    chunk_bytes: Annotated[int, Field(ge=4096, le=1 << 40)]  # bytes under one checksum
    progress: dict[str, Any]  # `zero_core.optim.train_state.TrainState.state_dict`, encoded
    client_state: dict[str, Any]  # the user's values, encoded
    has_frozen: bool = True  # whether values of frozen parameters were written
    subfolder: str | None = None  # folder of the files. None: the manifest's folder
    sha256: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_names(self)
        _check_layout(self)
        trained = {p.name for p in self.params if p.is_trainable}
        if trained and MASTER not in self.states:
            raise ValueError(f"no state {MASTER!r}")
        strange = (self.scalars.keys() | self.whole_states.keys()) - trained
        if strange:
            raise ValueError(f"{min(strange)} has a state and is no trained parameter")
        for name, scalars in self.scalars.items():
            for key in {"num_steps"} | ({"step"} & scalars.keys()):
                count = scalars.get(key)
                if count is None or not (0 <= count < 2**53 and count == int(count)):
                    raise ValueError(f"scalars.{name} has {key} {count}")
        for name, whole in self.whole_states.items():
            if whole.file not in self.files:
                raise ValueError(f"the state of {name} is in {whole.file!r}, which is not in files")
            if not isinstance(whole.state, dict) or whole.state.keys() != {"__items__"}:
                raise ValueError(f"the state of {name} is no mapping")
        _check_files(self)
        return self

    @cached_property
    def by_name(self) -> dict[str, Param]:
        return {param.name: param for param in self.params}

    def progress_step(self) -> int:
        """Return the number of optimizer steps before the save, or -1 if it is not recorded."""
        step = self.progress.get("global_steps")
        return step if isinstance(step, int) else -1


def _check_names(manifest: Manifest) -> None:
    owners: dict[str, str] = {}
    for param in manifest.params:
        if param.name in owners:
            raise ValueError(f"parameter {param.name} is there twice")
        owners[param.name] = param.name
    for param in manifest.params:
        for alias in param.aliases:
            if owners.setdefault(alias, param.name) != param.name:
                raise ValueError(f"{alias} is a name of {owners[alias]} and of {param.name}")
        if param.dtype not in KEYS:
            raise ValueError(f"parameter {param.name} has dtype {param.dtype!r}")
        order = param.memory_order
        if order is not None and sorted(order) != list(range(len(param.shape))):
            raise ValueError(f"parameter {param.name} has memory_order {order}")
    if len(set(manifest.states)) != len(manifest.states):
        raise ValueError(f"a state is there twice: {manifest.states}")
    reserved = {VALUE, WHOLE, RNG}.intersection(manifest.states)
    if reserved:
        raise ValueError(f"no state is called {min(reserved)!r}")


def _check_layout(manifest: Manifest) -> None:
    """Check that each parameter has one slot. Only equal slots of frozen parameters may overlap."""
    by_name, seen = manifest.by_name, set()
    for segment in manifest.segments:
        end = segment.shard_numel * manifest.world_size
        spans = []
        for name, start, stop in segment.slots:
            param = by_name.get(name)
            if param is None or name in seen:
                raise ValueError(f"{name} has a slot and is no parameter, or has two slots")
            seen.add(name)
            if param.is_trainable != segment.is_trainable:
                raise ValueError(f"{name} and its segment differ in is_trainable")
            lengths = [param.numel]
            if not param.is_trainable:  # a component's slot is counted in bytes
                lengths.append(param.nbytes)
            if not start <= stop <= end or stop - start not in lengths:
                raise ValueError(f"{name}, {param.shape}, has the slot {start} to {stop} of {end}")
            if start < stop:
                spans.append((start, stop))
        if not segment.is_trainable:  # components of quantized parameters may share memory
            spans = list(set(spans))
        for (_, before), (start, stop) in pairwise(sorted(spans)):
            if start < before:
                raise ValueError(f"the slots up to {before} and {start} to {stop} overlap")
    if len(seen) != len(by_name):
        raise ValueError(f"{min(by_name.keys() - seen)} has no slot")


def _check_files(manifest: Manifest) -> None:
    if len(manifest.python_rng) != manifest.world_size:  # bounds the loops over ranks below
        raise ValueError(f"python_rng has {len(manifest.python_rng)} ranks")
    for version, numbers, gauss in manifest.python_rng:
        try:
            random.Random().setstate((version, numbers, gauss))
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"python_rng is no state of a generator: {error}") from None
    if manifest.subfolder is not None and not storage.SUBFOLDER.fullmatch(manifest.subfolder):
        raise ValueError(f"subfolder {manifest.subfolder!r:.60} is not of the form data-TOKEN")
    for name, facts in manifest.files.items():
        if not is_plain(name) or name == MANIFEST:
            raise ValueError(f"files: {name!r} is no plain name of a file")
        if len(facts.crc32) != max(-(-facts.bytes // manifest.chunk_bytes), 1):
            raise ValueError(
                f"files.{name} has {len(facts.crc32)} checksums for {facts.bytes} bytes"
            )
    states = [*manifest.states, RNG, *([VALUE] if manifest.has_frozen else [])]
    needed = (file_name(s, r) for s in states for r in range(manifest.world_size))
    for name in chain([BUFFERS], needed):
        if name not in manifest.files:
            raise ValueError(f"files has no {name}")


def is_plain(name: str) -> bool:
    """Whether ``name`` is printable, of at most 200 bytes, without separators or a leading dot."""
    return (
        0 < len(name.encode("utf-8", "surrogatepass")) <= 200
        and not name.startswith(".")
        and name.isprintable()
        and not set(name) & {"/", "\\"}
    )


def seal(content: Mapping[str, Any]) -> bytes:
    body = json.dumps({k: v for k, v in content.items() if k != "sha256"}).encode()[:-1]
    return body + b', "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}'


def is_sealed(data: bytes) -> bool | None:
    """Whether the digest at the end of ``data`` (see `seal`) is right. None without a digest."""
    found = _TAIL.search(data, max(len(data) - _TAIL_BYTES, 0))
    if found is None:
        return None
    return hashlib.sha256(data[: found.start()]).hexdigest().encode() == found[1]


class _Kind(BaseModel):
    """Members of a manifest that are the same in all versions of the format."""

    model_config = ConfigDict(strict=True)

    format: str
    version: int


def parse(data: bytes, where: object) -> Manifest:
    _check_size(len(data), where)
    has_its_digest = is_sealed(data)
    if has_its_digest is False:
        raise CheckpointCorruptError(
            f"{where} is damaged: its SHA-256 is not the one at its end; load an older checkpoint "
            "by its tag"
        )
    try:
        kind = _Kind.model_validate_json(data)
        if kind.format != FORMAT or kind.version != VERSION:
            raise CheckpointError(
                f"{where} has format {kind.format!r:.60} version {kind.version!r:.60}; this "
                f"package reads {FORMAT!r} version {VERSION}"
            )
        if not has_its_digest:
            raise ValueError("it does not end with a member sha256")
        return Manifest.model_validate_json(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = first_error(error) if isinstance(error, ValidationError) else repr(error)
        raise CheckpointCorruptError(f"{where} is not readable: {reason:.500}") from error


def read_manifest(place: Location) -> Manifest:
    path = place / MANIFEST
    with open_regular(path, follows_links=False) as file:
        size = size_of(file)
        _check_size(size, path)  # checked before memory for the content is allocated
        return parse(file.read(size), path)


def _check_size(size: int, where: object) -> None:
    if size > _MAX_BYTES:
        raise CheckpointCorruptError(
            f"{where} has {size} bytes, more than the {_MAX_BYTES} of any manifest"
        )


def fill(frame: Mapping[str, Any], rows: Iterable[Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a manifest's content. ``rows``: each rank's files, scalars, RNG and whole states."""
    files, scalars, rng, wholes = zip(*rows, strict=True)
    return {
        **frame,
        "states": list(names),
        "scalars": {k: v for row in scalars for k, v in row.items()},
        "whole_states": {k: v for row in wholes for k, v in row.items()},
        "python_rng": list(rng),
        "files": {k: v for row in files for k, v in row.items()},
    }


def frame_of(state: ShardedState) -> dict[str, Any]:
    """Return the members of a manifest that depend only on the engine's layout and optimizer."""
    layout = state.layout
    return {
        "format": FORMAT,
        "version": VERSION,
        "chunk_bytes": CHUNK_BYTES,
        "world_size": layout.world_size,
        "optimizer": state.optimizer,
        "params": [
            {
                "name": spec.name,
                "aliases": list(spec.aliases),
                "shape": list(spec.shape),
                "dtype": str(spec.dtype).removeprefix("torch."),
                "is_trainable": spec.is_trainable,
                **({"memory_order": list(spec.order)} if spec.order or spec.is_opaque else {}),
            }
            for spec in layout.params
        ],
        "segments": [
            {
                "is_trainable": s.is_trainable,
                "shard_numel": s.shard_numel,
                "slots": [[layout.params[x.param].name, x.start, x.stop] for x in s.slots],
            }
            for s in layout.segments
        ],
    }


def write_manifest(staging: Staging, content: Mapping[str, Any]) -> None:
    if staging.subfolder is not None:
        content = {**content, "subfolder": staging.subfolder}
    data = seal(content)
    parse(data, MANIFEST)  # never write a manifest that could not be loaded
    staging.describe(data)
