"""Readers of checkpoints that need no engine.

`read_weights` reads the model in a program without ranks. What it reads has been checked.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from zero_core.checkpoint.manifest import (
    BUFFERS,
    MANIFEST,
    VALUE,
    Manifest,
    Param,
    file_name,
    is_plain,
    read_manifest,
    slice_key,
)
from zero_core.checkpoint.safetensors_files import StoredTensor, read_header
from zero_core.checkpoint.storage import LATEST, Location, location_of, open_regular, size_of
from zero_core.errors import CheckpointCorruptError, CheckpointError, CheckpointFailedError
from zero_core.layout.arithmetic import ParamSpec, unflatten
from zero_core.sharded.sharded_state import MASTER

_MAX_LATEST_BYTES = 1024
_BLOCK_BYTES = 1 << 20
"""Bytes of a file read at once: they stay in the processor's cache for their checksum."""
_ADVICE = "load an older checkpoint by its tag"


def check_tag(tag: str) -> None:
    if not is_plain(tag) or tag == LATEST:
        raise CheckpointError(f"a tag must be a plain folder name, found {tag!r:.300}")


def read_latest(directory: Location) -> str | None:
    """Return the tag of the newest checkpoint in ``directory``, None if there is none."""
    path = directory / LATEST
    try:
        with open_regular(path, follows_links=False) as file:
            data = file.read(_MAX_LATEST_BYTES)
    except (CheckpointCorruptError, CheckpointFailedError):
        raise
    except CheckpointError:
        return None
    try:
        tag = data.decode().removesuffix("\n")
        check_tag(tag)
    except (UnicodeDecodeError, CheckpointError) as error:
        raise CheckpointCorruptError(
            f"{path} must have the tag of a checkpoint: {error}; load one by its tag"
        ) from error
    return tag


def find(directory: Location, tag: str | None) -> Location:
    """Return the folder of checkpoint ``tag``, or of the newest one."""
    tag = read_latest(directory) if tag is None else tag
    if tag is None:
        raise CheckpointError(
            f"{directory} holds no checkpoint (no file 'latest'): check the path, or leave the "
            "resuming out to start from scratch"
        )
    check_tag(tag)
    # A save that was killed between its two renames leaves the checkpoint under the old name.
    for place in (directory / tag, directory / f".{tag}.old"):
        if (place / MANIFEST).exists():
            return place
    raise CheckpointError(f"{directory / tag} is not a checkpoint: there is no {MANIFEST} in it")


def holds_checkpoint(directory: Location) -> bool:
    return (directory / LATEST).is_file()


def newest_step(directory: Location) -> int:
    """Return the step of the newest checkpoint in ``directory``, -1 if none can be read."""
    try:
        return read_manifest(find(directory, None)).progress_step()
    except CheckpointError:
        return -1


def crc_of(file: IO[bytes], count: int, path: Location) -> int:
    """Return the CRC-32 of the next ``count`` bytes of a file. ``path`` is for messages."""
    crc, left = 0, count
    while left:
        data = file.read(min(left, _BLOCK_BYTES))
        if not data:
            raise CheckpointCorruptError(f"{path} ended while it was read")
        crc = zlib.crc32(data, crc)
        left -= len(data)
    return crc


@dataclass(frozen=True)
class Weight:
    """Parameter of a checkpoint."""

    names: tuple[str, ...]  # its name and the names tied to it
    value: Tensor  # the whole value on the CPU, unrounded if it is trained, else in its own dtype
    dtype: torch.dtype  # compute dtype
    is_trainable: bool  # whether it is trained


class Reader:
    """Reader of ranges of parameters' states from the slices that the writing ranks stored.

    Each chunk of a file is checked before its first use: a file that is missing, or is not what was
    written, is a `CheckpointCorruptError`.
    """

    def __init__(self, place: Location, manifest: Manifest | None = None) -> None:
        self.folder = place
        self.manifest = manifest = manifest or read_manifest(place)
        self._files = place / manifest.subfolder if manifest.subfolder else place
        if isinstance(self._files, Path) and manifest.subfolder and self._files.is_symlink():
            raise CheckpointCorruptError(f"{self._files} is a link: put a copy in its place")
        self._headers: dict[str, Mapping[str, StoredTensor]] = {}
        self._checked: set[tuple[str, int]] = set()  # chunks
        self._slots = {
            name: (index, start, stop, segment.shard_numel)
            for index, segment in enumerate(manifest.segments)
            for name, start, stop in segment.slots
        }

    def chunks(self) -> list[tuple[str, int]]:
        """Return name and number of each chunk of all files."""
        files = self.manifest.files
        return [(name, i) for name in sorted(files) for i in range(len(files[name].crc32))]

    def check(self, chunks: Iterable[tuple[str, int]]) -> None:
        """Compare chunks with their checksums, those that have not been compared before."""
        by_name: dict[str, list[int]] = {}
        for name, index in chunks:
            if (name, index) not in self._checked:
                by_name.setdefault(name, []).append(index)
        for name, indices in by_name.items():
            path, facts = self._files / name, self.manifest.files[name]
            try:
                with open_regular(path, follows_links=False) as file:
                    if size_of(file) != facts.bytes:
                        raise CheckpointCorruptError(
                            f"{path} is damaged: it has {size_of(file)} bytes, {facts.bytes} were "
                            f"written; {_ADVICE}"
                        )
                    for index in indices:
                        start = index * self.manifest.chunk_bytes
                        stop = min(start + self.manifest.chunk_bytes, facts.bytes)
                        file.seek(start)
                        found = crc_of(file, stop - start, path)
                        if found != facts.crc32[index]:
                            raise CheckpointCorruptError(
                                f"{path} is damaged between the bytes {start} and {stop}: expected "
                                f"crc32 {facts.crc32[index]}, found {found}; {_ADVICE}"
                            )
                        self._checked.add((name, index))
            except CheckpointCorruptError:
                raise
            except (OSError, CheckpointError) as error:
                raise CheckpointCorruptError(
                    f"{path} cannot be read: {error}; {_ADVICE}"
                ) from error

    def _check_bytes(self, name: str, low: int, high: int) -> None:
        chunk = self.manifest.chunk_bytes
        self.check((name, index) for index in range(low // chunk, -(-high // chunk)))

    def trust(self) -> None:
        """Note that other ranks have checked all chunks of these very files."""
        self._checked.update(self.chunks())

    def tensors(self, name: str) -> Mapping[str, StoredTensor]:
        """Return the tensors of file ``name``. Its header is checked."""
        if name not in self._headers:
            if name not in self.manifest.files:
                raise CheckpointCorruptError(
                    f"{self.folder / MANIFEST} has no file {name}: the checkpoint is not whole"
                )
            self.check([(name, 0)])
            found = read_header(self._files / name, follows_links=False)
            self._check_bytes(name, 0, min((t.start for t in found.values()), default=1))
            self._headers[name] = found
        return self._headers[name]

    def read_parts(self, parts: Sequence[StoredTensor]) -> Tensor:
        """Return the elements of consecutive parts. They are checked first."""
        for part in parts:
            size = part.numel * part.dtype.itemsize
            self._check_bytes(part.path.name, part.start, part.start + size)
        found = [part.value() for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def read_tensor(self, file: str, name: str) -> Tensor:
        """Return tensor ``name`` of ``file``. It is checked first."""
        stored = self.tensors(file).get(name)
        if stored is None:
            raise CheckpointCorruptError(f"{self._files / file} has no tensor {name!r}")
        return self.read_parts([stored])

    def read_buffers(self) -> dict[str, Tensor]:
        return {name: self.read_tensor(BUFFERS, name) for name in self.tensors(BUFFERS)}

    def weights(self) -> Iterator[Weight]:
        for param in self.manifest.params:
            if not param.is_trainable and not self.manifest.has_frozen:
                continue
            state = MASTER if param.is_trainable else VALUE
            flat = self.read_parts(self.parts(state, param.name, 0, self.slot_numel(param.name)))
            if param.memory_order is not None and state == VALUE:
                flat = flat.view(param.torch_dtype)
            if flat.numel() != param.numel:
                raise CheckpointError(
                    f"{self.folder}: {param.name} is quantized, and this version of the format "
                    "does not say how: load it with an engine"
                )
            value = unflatten(flat, param.shape, param.memory_order or ())
            yield Weight(
                names=(param.name, *param.aliases),
                value=value if self.is_quantized(param) else value.contiguous(),
                dtype=param.torch_dtype,
                is_trainable=param.is_trainable,
            )

    def parts(self, state: str, param: str, start: int, stop: int) -> list[StoredTensor]:
        """Find elements ``[start, stop)`` of a parameter's ``state``, without reading them."""
        segment, slot_start, slot_stop, numel = self._slots[param]
        low, high = slot_start + start, slot_start + stop
        if not slot_start <= low <= high <= slot_stop:
            raise CheckpointCorruptError(f"{self.folder}: {param} has no [{start}, {stop})")
        saved, found = self.manifest.by_name[param], []
        for rank in self.ranks_of(param, start, stop):
            name, own = file_name(state, rank), rank * numel
            # ``stored`` has [first, last) of the segment: the rank's shard, or what the parameter
            # has of it, in files of a state that not all parameters have.
            stored, first, last = self.tensors(name).get(slice_key(param)), own, own + numel
            if stored is None:
                stored = self.tensors(name).get(str(segment))
            else:
                first = max(slot_start, first)
                last = max(min(slot_stop, last), first)
            if stored is None or stored.shape != (last - first,):
                there = "nothing" if stored is None else f"shape {stored.shape}"
                raise CheckpointCorruptError(
                    f"{self._files / name} must have {last - first} elements for {param}, found "
                    f"{there}"
                )
            is_value = stored.dtype in (saved.torch_dtype, torch.uint8)
            if not (is_value if state == VALUE else stored.dtype.is_floating_point):
                raise CheckpointCorruptError(
                    f"{self._files / name} has {state} of {param}, {saved.dtype}, as {stored.dtype}"
                )
            begin, end = (min(max(x, first), last) - first for x in (low, high))
            found.append(stored.part(begin, end))
        return found

    def ranks_of(self, param: str, start: int, stop: int) -> range:
        """Return the writing ranks whose slices have elements ``[start, stop)`` of a parameter."""
        _, slot_start, _, numel = self._slots[param]
        low, high = slot_start + start, slot_start + stop
        if low >= high:
            return range(1)  # an empty parameter has the dtype of the file
        return range(low // numel, (high - 1) // numel + 1)

    def slot_numel(self, param: str) -> int:
        _, start, stop, _ = self._slots[param]
        return stop - start

    def scalars(self, param: str) -> Mapping[str, float]:
        """Return the numbers in a parameter's optimizer state. A frozen one was never updated."""
        if not self.manifest.by_name[param].is_trainable:
            return {"num_steps": 0}
        if param not in self.manifest.scalars:
            raise CheckpointCorruptError(
                f"{self.folder}: the optimizer's numbers of {param} are missing"
            )
        return self.manifest.scalars[param]

    def is_quantized(self, param: Param) -> bool:
        """Whether a frozen parameter was stored as bytes: a quantizer's, or integers."""
        num_bytes = param.numel * param.torch_dtype.itemsize
        return not param.is_trainable and self.slot_numel(param.name) == num_bytes > 0

    def has_order_of(self, spec: ParamSpec) -> bool:
        """Whether the saved slot of a parameter has the elements in the order of ``spec``'s."""
        saved = self.manifest.by_name[spec.name]
        return spec.is_opaque or (saved.memory_order or ()) == spec.order


def read_weights(directory: Path | str, tag: str | None = None) -> Iterator[Weight]:
    """Yield every parameter of checkpoint ``tag``, or of the newest, on one process.

    Values of frozen parameters are left out where the checkpoint was saved without them.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: it is not what was written.
    """
    yield from Reader(find(location_of(directory), tag)).weights()


def read_buffers(directory: Path | str, tag: str | None = None) -> dict[str, Tensor]:
    """Return the persistent buffers of checkpoint ``tag``, or of the newest."""
    return Reader(find(location_of(directory), tag)).read_buffers()
