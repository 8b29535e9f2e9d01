"""Functions that find, read, verify, export and prune checkpoints without an engine.

torch is imported where tensors are read: finding, verifying and pruning do not need it.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from zero_core.checkpoint.json_values import decode, find_classes
from zero_core.checkpoint.manifest import (
    BUFFERS,
    MANIFEST,
    RNG,
    VALUE,
    Manifest,
    Param,
    file_name,
    is_plain,
    read_manifest,
    slice_key,
)
from zero_core.checkpoint.safetensors_files import DTYPES, KEYS, ModelFiles, StoredTensor, read_open
from zero_core.checkpoint.storage import (
    LATEST,
    Location,
    discard,
    local_path,
    location_of,
    open_regular,
    size_of,
)
from zero_core.core.extension import PREFIX
from zero_core.errors import CheckpointCorruptError, CheckpointError, CheckpointFailedError
from zero_core.optim.progress import check_progress
from zero_core.sharded import MASTER

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zero_core.layout.arithmetic import ParamSpec

_log = logging.getLogger(__name__)
_MAX_LATEST_BYTES = 1024
_BLOCK_BYTES = 1 << 20  # small blocks stay in the CPU cache between read and checksum
_RNG_WORDS = 624  # words of a Mersenne Twister's state, as in torch's CPU generator
_ADVICE = "load an older checkpoint by its tag"
PARTS = ("frozen", "optimizer", "lr_scheduler", "progress", "rng")
"""Parts of a checkpoint that a load may leave out. "frozen": values of parameters that were frozen.
"optimizer": optimizer states and hyperparameters. Without these, another optimizer may be used.
"progress": counters, the loss scale and "rng". "rng": the states of random generators."""


def check_tag(tag: object) -> None:
    if not isinstance(tag, str) or not is_plain(tag) or tag == LATEST:
        raise CheckpointError(f"a tag must be a plain folder name, found {tag!r:.300}")


def read_latest(directory: Location) -> str | None:
    """Return the tag in the file ``latest`` of ``directory``, or None if there is no such file."""
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
    """Return the folder of checkpoint ``tag``, by default of the one that ``latest`` names."""
    tag = read_latest(directory) if tag is None else tag
    if tag is None and (directory / MANIFEST).exists():
        raise CheckpointError(
            f"{directory} is a single checkpoint: load_checkpoint({str(directory.parent)!r}, "
            f"tag={directory.name!r}) loads it, resume({str(directory.parent)!r}) the newest"
        )
    if tag is None:
        missing = "no file 'latest'" if directory.exists() else "there is no such folder"
        raise CheckpointError(
            f"{directory} holds no checkpoint ({missing}): give the folder of save_checkpoint()"
        )
    check_tag(tag)
    # A save that is replacing a checkpoint first renames the old one, and may then be killed.
    for place in (directory / tag, directory / f".{tag}.old"):
        if (place / MANIFEST).exists():
            return place
    known = ", ".join(list_checkpoints(directory)) if directory.is_dir() else ""
    raise CheckpointError(
        f"{directory / tag} is not a checkpoint: there is no {MANIFEST} in it; checkpoints of "
        f"{directory}: {known or 'none'}"
    )


def holds_checkpoint(directory: Location) -> bool:
    return (directory / LATEST).is_file()


def newest_step(directory: Location) -> int:
    """Return the step of the newest checkpoint in ``directory``, or -1 if none can be read."""
    try:
        return read_manifest(find(directory, None)).progress_step()
    except CheckpointError:
        return -1


def check_kept(keep_last: int | None, keep_every: int | None) -> None:
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise CheckpointError(f"{name} = {value}: expected 1 or more, or None")


def list_checkpoints(directory: Location) -> list[str]:
    """Return the tags of complete checkpoints, the oldest first. Reads no manifests."""
    found = []
    try:
        places = [p for p in directory.iterdir() if is_plain(p.name) and p.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    for place in places:
        path = place / MANIFEST
        with suppress(OSError):
            saved_at_ns = path.stat().st_mtime_ns if isinstance(path, Path) else path.modified_ns()
            found.append((saved_at_ns, split_tag(place.name)[1] or 0, place.name))
    return [tag for _, _, tag in sorted(found)]


def split_tag(tag: str) -> tuple[str, int | None]:
    """Split ``tag`` into a prefix and its final digits as a number, or None without digits."""
    prefix = tag.rstrip("0123456789")
    return prefix, None if prefix == tag else int(tag.removeprefix(prefix))


def prune(
    directory: Location,
    keep_last: int,
    keep_every: int | None,
    prefixes: Collection[str],
    *,
    newest: str | None = None,
    is_trial: bool = False,
) -> list[str]:
    """Prune as `prune_checkpoints` does. ``newest``: tag of a checkpoint that was just saved."""
    parts = [(tag, *split_tag(tag)) for tag in list_checkpoints(directory)]
    saved = [(tag, n) for tag, prefix, n in parts if n is not None and prefix in prefixes]
    latest = read_latest(directory)
    prefix, reached = split_tag(newest or latest or "")
    if reached is None or prefix not in prefixes:
        reached = max((step for _, step in saved), default=0)
    # Sort by step, because copies of folders have new times. Remove steps > ``reached`` first.
    saved.sort(key=lambda one: (one[1] <= reached, one[1]))
    removed = []
    for tag, step in saved[: max(len(saved) - keep_last, 0)]:
        if tag in (newest, latest) or (keep_every and step % keep_every == 0):
            continue
        with suppress(CheckpointError):  # unreadable checkpoints stay
            if read_manifest(directory / tag).progress_step() == step:
                removed.append(tag)
    for tag in () if is_trial else removed:
        try:
            discard(directory / tag)
        except OSError as error:
            _log.warning("%s stays, though it is not to be kept: %s", directory / tag, error)
    return removed


def prune_checkpoints(
    directory: str | Path,
    *,
    keep_last: int,
    keep_every: int | None = None,
    prefixes: Collection[str] = ("step-", "global_step"),
    is_trial: bool = False,
) -> list[str]:
    """Remove old checkpoints and return their tags.

    A checkpoint is removed only if its tag is one of ``prefixes`` followed by the checkpoint's step
    (``step-300``). Other names ("best", "best-300"), unreadable checkpoints and the checkpoint that
    the file ``latest`` names always stay.

    Args:
        directory: the folder of all checkpoints.
        keep_last: number of checkpoints to keep, counted back from the newest. Checkpoints of steps
            after the newest's are removed first: training has restarted from an earlier step.
        keep_every: also keep checkpoints whose step is a multiple of ``keep_every``.
        prefixes: prefixes of the tags to remove.
        is_trial: return the tags, and remove nothing.

    Raises:
        CheckpointError: a number is below 1, or the folder or ``latest`` in it cannot be read.
    """
    check_kept(keep_last, keep_every)
    return prune(location_of(directory), keep_last, keep_every, prefixes, is_trial=is_trial)


def crc_of(file: IO[bytes], count: int, path: Location) -> int:
    """Return the CRC-32 of the next ``count`` bytes of a file. ``path`` is for error messages."""
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
    """A parameter of a checkpoint."""

    names: tuple[str, ...]  # the parameter's name, and its other names if it is tied
    value: Tensor  # whole value on the CPU: master weight, or the value of a frozen parameter
    dtype: torch.dtype  # compute dtype
    is_trainable: bool


class Reader:
    """Reader of a checkpoint. Finds any range of a state in the files of the ranks that wrote it.

    Values are read only from chunks that agree with their checksums, or that other ranks have
    checked (`trust`). Missing or changed files raise CheckpointCorruptError.
    """

    def __init__(self, place: Location, manifest: Manifest | None = None) -> None:
        self.folder = place
        self.manifest = manifest = manifest or read_manifest(place)
        self._files = place / manifest.subfolder if manifest.subfolder else place
        if isinstance(self._files, Path) and manifest.subfolder and self._files.is_symlink():
            raise CheckpointCorruptError(f"{self._files} is a link: put a copy in its place")
        self._headers: dict[str, Mapping[str, StoredTensor]] = {}
        self._checked: set[tuple[str, int]] = set()  # checked chunks: file and index
        self._slots = {
            name: (index, start, stop, segment.shard_numel)
            for index, segment in enumerate(manifest.segments)
            for name, start, stop in segment.slots
        }

    def chunks(self) -> list[tuple[str, int]]:
        files = self.manifest.files
        return [(name, i) for name in sorted(files) for i in range(len(files[name].crc32))]

    def check(self, chunks: Iterable[tuple[str, int]]) -> None:
        """Compare chunks with their checksums, except chunks that were compared before."""
        for name, of_file in groupby(sorted({*chunks} - self._checked), key=itemgetter(0)):
            path, facts = self._files / name, self.manifest.files[name]
            try:
                with open_regular(path, follows_links=False) as file:
                    if size_of(file) != facts.bytes:
                        raise CheckpointCorruptError(
                            f"{path} is damaged: it has {size_of(file)} bytes, {facts.bytes} were "
                            f"written; {_ADVICE}"
                        )
                    for _, index in of_file:
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
            except (CheckpointCorruptError, CheckpointFailedError):
                raise
            except (OSError, CheckpointError) as error:
                raise CheckpointCorruptError(
                    f"{path} cannot be read: {error}; {_ADVICE}"
                ) from error

    def _check_bytes(self, name: str, low: int, high: int) -> None:
        chunk = self.manifest.chunk_bytes
        self.check((name, index) for index in range(low // chunk, -(-high // chunk)))

    def trust(self) -> None:
        """Mark all chunks as checked, because other ranks have checked the same files."""
        self._checked.update(self.chunks())

    def tensors(self, name: str) -> Mapping[str, StoredTensor]:
        """Return the tensors of file ``name`` by name, without values. Checks the file's header."""
        if name not in self._headers:
            self.check([(name, 0)])
            path = self._files / name
            with open_regular(path, follows_links=False) as file:
                found, _ = read_open(file, path)
            self._check_bytes(name, 0, min((t.start for t in found.values()), default=1))
            self._headers[name] = found
        return self._headers[name]

    def read_parts(self, parts: Sequence[StoredTensor]) -> Tensor:
        """Check and read ``parts``, and return their elements as one tensor."""
        found = []
        for part in parts:
            size = part.numel * part.itemsize
            self._check_bytes(part.path.name, part.start, part.start + size)
            with open_regular(part.path, follows_links=False) as file:
                found.append(part.read_from(file))
        if len(found) == 1:
            return found[0]
        import torch

        return torch.cat(found)

    def read_tensor(self, file: str, name: str) -> Tensor:
        stored = self.tensors(file).get(name)
        if stored is None:
            raise CheckpointCorruptError(f"{self._files / file} has no tensor {name!r}")
        return self.read_parts([stored])

    def read_random_state(self, rank: int, kind: str = "torch") -> Tensor:
        """Return the saved state of a rank's random generator: "torch" (of the CPU) or "cuda"."""
        import torch

        saved = self.read_tensor(file_name(RNG, rank), kind)
        try:
            torch.Generator("cpu" if kind == "torch" else kind).set_state(saved)
        except (RuntimeError, TypeError) as error:
            raise CheckpointCorruptError(
                f"{self.folder}: no state of a random generator: {error}"
            ) from error
        return saved

    def read_progress(self) -> tuple[dict[str, Any], dict[str, Any]]:
        found = decode(self.manifest.progress), decode(self.manifest.client_state)
        if not all(isinstance(value, dict) for value in found):
            raise CheckpointCorruptError(f"{self.folder}: progress or client state is no mapping")
        progress, client_state = found
        check_progress(progress)
        return progress, dict(client_state)  # `decode` may return a Counter

    def read_buffers(self) -> dict[str, Tensor]:
        return {name: self.read_tensor(BUFFERS, name) for name in self.tensors(BUFFERS)}

    def weights(self) -> Iterator[Weight]:
        from zero_core.layout.arithmetic import unflatten

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
        """Return where the files have elements ``[start, stop)`` of a parameter's ``state``."""
        segment, slot_start, slot_stop, numel = self._slots[param]
        low, high = slot_start + start, slot_start + stop
        if not slot_start <= low <= high <= slot_stop:
            raise CheckpointCorruptError(f"{self.folder}: {param} has no [{start}, {stop})")
        saved, found = self.manifest.by_name[param], []
        for rank in self.ranks_of(param, start, stop):
            name, own = file_name(state, rank), rank * numel
            # ``stored`` has [first, last) of the segment: the rank's shard, or the parameter's part
            # of the shard if the state does not exist for all parameters.
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
            is_value = stored.format in (KEYS[saved.dtype], "U8")
            if not (is_value if state == VALUE else "F" in stored.format):
                raise CheckpointCorruptError(
                    f"{self._files / name} has {state} of {param}, {saved.dtype}, as "
                    f"{DTYPES[stored.format][0]}"
                )
            begin, end = (min(max(x, first), last) - first for x in (low, high))
            found.append(stored.part(begin, end))
        return found

    def ranks_of(self, param: str, start: int, stop: int) -> range:
        _, slot_start, _, numel = self._slots[param]
        low, high = slot_start + start, slot_start + stop
        if low >= high:
            return range(1)  # rank 0's file has the dtype of an empty parameter
        return range(low // numel, (high - 1) // numel + 1)

    def slot_numel(self, param: str) -> int:
        _, start, stop, _ = self._slots[param]
        return stop - start

    def scalars(self, param: str) -> Mapping[str, float]:
        if not self.manifest.by_name[param].is_trainable:
            return {"num_steps": 0}
        if param not in self.manifest.scalars:
            raise CheckpointCorruptError(
                f"{self.folder}: the optimizer's numbers of {param} are missing"
            )
        return self.manifest.scalars[param]

    def is_quantized(self, param: Param) -> bool:
        """Whether a frozen parameter was stored as bytes, as quantized parameters are."""
        return not param.is_trainable and self.slot_numel(param.name) == param.nbytes > 0

    def has_order_of(self, spec: ParamSpec) -> bool:
        """Whether the parameter's elements were saved in the memory order of ``spec``."""
        saved = self.manifest.by_name[spec.name]
        return spec.is_opaque or (saved.memory_order or ()) == spec.order


def read_client_state(directory: Path | str, tag: str | None = None) -> dict[str, Any]:
    """Return the client state of checkpoint ``tag``, by default the newest, without an engine.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: the manifest, or the file ``latest``, is damaged.
    """
    return Reader(find(location_of(directory), tag)).read_progress()[1]


def read_weights(directory: Path | str, tag: str | None = None) -> Iterator[Weight]:
    """Yield every parameter of checkpoint ``tag``, by default the newest, without an engine.

    Frozen parameters are missing if the checkpoint was saved without them.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: the checkpoint is damaged or incomplete.
    """
    yield from Reader(find(location_of(directory), tag)).weights()


def read_buffers(directory: Path | str, tag: str | None = None) -> dict[str, Tensor]:
    """Return the persistent buffers of checkpoint ``tag``, by default the newest."""
    return Reader(find(location_of(directory), tag)).read_buffers()


class Progress(Protocol):
    """Callback that reports progress: ``done`` of ``total``."""

    def __call__(self, done: int, total: int, /) -> None: ...


def verify_checkpoint(
    directory: str | Path, tag: str | None = None, *, progress: Progress | None = None
) -> int:
    """Check every byte of checkpoint ``tag``, by default the newest, and that nothing is missing.

    Also checks the form of weights, optimizer states and scalars, random generators, counters and
    hyperparameters, as far as this needs no engine. Calls ``progress`` with the bytes checked so
    far and the total number of bytes. Returns the total, which excludes the manifest.

    Raises:
        CheckpointError: there is no such checkpoint, or it was removed or replaced while read.
        CheckpointCorruptError: the checkpoint is damaged or incomplete.
    """
    reader = Reader(find(location_of(directory), tag))
    manifest = reader.manifest
    total, done = sum(facts.bytes for facts in manifest.files.values()), 0
    with _staying(reader):
        for name, index in reader.chunks():
            reader.check([(name, index)])
            chunk = manifest.chunk_bytes
            done += min(chunk, manifest.files[name].bytes - index * chunk)
            if progress is not None:
                progress(done, total)
        for name in manifest.files:
            reader.tensors(name)
        for param in manifest.params:
            name, whole = param.name, manifest.whole_states.get(param.name)
            if whole is not None:
                find_classes(whole.state, reader.tensors(whole.file))
            has_state = param.numel > 0 and reader.scalars(name)["num_steps"] > 0
            states = manifest.states if has_state and whole is None else (MASTER,)
            states = (*states, *(n for n in manifest.states if n.startswith(PREFIX)))
            if not param.is_trainable:
                states = (VALUE,) if manifest.has_frozen else ()
            for state in states:
                reader.parts(state, name, 0, reader.slot_numel(name))
        buffers = list(reader.tensors(BUFFERS))
        if manifest.by_name.keys() & buffers:
            raise CheckpointCorruptError(
                f"{reader.folder / BUFFERS} has the name of a parameter: {buffers[:4]}"
            )
        for rank in range(manifest.world_size):
            saved = reader.tensors(file_name(RNG, rank)).get("torch")
            if saved is None or not _is_random_state(saved):
                raise CheckpointCorruptError(f"{reader.folder}: no random state of rank {rank}")
        reader.read_progress()
    return done


def _is_random_state(saved: StoredTensor) -> bool:
    """Return whether ``saved`` holds a state of torch's CPU generator. Needs no torch."""
    if saved.format != "U8" or saved.numel < 8 * _RNG_WORDS:
        return False
    with open_regular(saved.path) as file:
        file.seek(saved.start)
        _, left, is_seeded, following = struct.unpack("<QiiQ", file.read(24))
    return bool(is_seeded) and 0 < left <= _RNG_WORDS and following <= _RNG_WORDS


@contextmanager
def _staying(reader: Reader) -> Iterator[None]:
    """Replace a CheckpointError by a clearer one if the checkpoint was removed or replaced."""
    try:
        yield
    except CheckpointError as error:
        place, now = reader.folder, None
        with suppress(CheckpointError):
            now = read_manifest(place)
        if now is None or now.sha256 != reader.manifest.sha256:
            raise CheckpointError(
                f"{place} was removed or replaced while it was read (by keep_last of a run, or a "
                "save of the same tag): take another checkpoint"
            ) from error
        raise


def inspect_checkpoint(directory: str | Path, tag: str | None = None) -> dict[str, Any]:
    """Describe checkpoint ``tag``, by default the newest, as JSON. Reads no files of tensors.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: its manifest, or the file ``latest``, is damaged.
    """
    folder = location_of(directory)
    latest = read_latest(folder)
    place = find(folder, latest if tag is None else tag)
    manifest = read_manifest(place)
    trained = [param for param in manifest.params if param.is_trainable]
    return {
        "folder": str(place),
        "tag": latest if tag is None else tag,
        "version": manifest.version,
        "step": manifest.progress_step(),
        "world_size": manifest.world_size,
        "optimizer": manifest.optimizer,
        "states": list(manifest.states),
        "parameters": len(manifest.params),
        "elements": sum(param.numel for param in manifest.params),
        "trained_elements": sum(param.numel for param in trained),
        "has_frozen": manifest.has_frozen,
        "bytes": sum(facts.bytes for facts in manifest.files.values()),
        "files": len(manifest.files),
        "client_state": sorted(manifest.client_state),
        "latest": latest,
        "tags": list_checkpoints(folder),
    }


def export_checkpoint(
    directory: str | Path,
    output: str | Path,
    tag: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the model of a checkpoint as ``model.safetensors``, in Hugging Face's layout.

    Parameters are written one at a time. A tied weight is stored under its first name only. Files
    get their final names at the end. Returns the names of the parameters that were written.

    Args:
        directory: the folder of all checkpoints.
        output: a folder, which is created.
        tag: tag of the checkpoint. None is the newest.
        dtype: dtype of floating-point parameters. None: their compute dtypes.
        progress: called with the number of parameters written so far, and the total.

    Raises:
        CheckpointError: there is no such checkpoint, it lacks frozen values, or the disk is full.
        CheckpointCorruptError: the checkpoint is damaged or incomplete.
    """
    reader = Reader(find(location_of(directory), tag))
    manifest = reader.manifest
    if not manifest.has_frozen and any(not p.is_trainable for p in manifest.params):
        raise CheckpointError(
            f"{reader.folder} was saved without the values of frozen parameters: load it into an "
            "engine of the model, and export that"
        )
    files = ModelFiles(local_path(output, "an export"))
    written = []
    try:
        with _staying(reader):
            for weight in reader.weights():
                value = weight.value
                if value.is_floating_point() and weight.dtype.is_floating_point:
                    value = value.to(dtype or weight.dtype)
                files.add(weight.names[0], value)
                written.append(weight.names[0])
                if progress is not None:
                    progress(len(written), len(manifest.params))
            for name, buffer in reader.read_buffers().items():
                files.add(name, buffer)
        files.finish()
    except BaseException:
        files.discard()
        raise
    return written
