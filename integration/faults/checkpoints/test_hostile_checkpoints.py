"""Forged, damaged and half-written checkpoints are refused quickly, with nothing written."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_core
from faults.harness import Program, complete
from zero_core.checkpoint.files import find, read_buffers, read_client_state, read_weights
from zero_core.checkpoint.manifest import MANIFEST, seal
from zero_core.testing import Case, SimulatedRanks, batch, make_model, simulate, train

_MAX_S = 1.0
_MAX_BYTES = 32 << 20
_NEVER_FREE = 2**30  # more bytes than this process has mapped but unused
BAD: tuple[Any, ...] = (None, True, -1, 2**63, 1e400, "x" * 50, [], {}, [[]], "../../etc/passwd")
"""Values that entries of a manifest must not have, apart from those in `ALLOWED`."""
_HUGE = 1 << 40
Change = Callable[[dict[str, Any]], object]
OF_OTHERS = ("python_rng", "param_groups", "lr_scheduler", "scalars", "client_state")
"""Entries with arbitrary content: set by Python, an optimizer, a schedule or a program."""
ALLOWED = {
    ("has_frozen", "true"),
    ("client_state", "{}"),
    ("aliases", "[]"),
    ("is_trainable", "true"),
    ("whole_states", "{}"),
    ("loss_scaler", "{}"),
    ("lr_scheduler", "null"),
    ("param_groups", "[]"),  # with another number of groups the engine keeps its own
}
"""Last key of a path and value of `BAD`, as JSON, that a manifest may hold."""


def manifests(content: dict[str, Any]) -> Iterator[tuple[str, Change]]:
    """Yield a name and an edit of a manifest like ``content``.

    Each edited manifest must be refused.
    """
    counts = [("scalars", min(content["scalars"]), name) for name in ("num_steps", "step")]
    for path in (*_places(content), *counts):
        for bad in BAD:
            text = json.dumps(bad)
            if (path[-1], text) not in ALLOWED:
                yield f"{'.'.join(map(str, path))} = {text[:30]}", partial(_put, path, bad)
    yield from _own()


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield paths of entries: in lists and ``files`` only of the first, inside `OF_OTHERS` none."""
    entries = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
    is_table = isinstance(node, list) or path[-1:] == ("files",)
    for key, value in entries[:1] if is_table else entries:
        if key != "sha256":  # the digest is recomputed after an edit
            yield (*path, key)
        if isinstance(value, dict | list) and key not in OF_OTHERS:
            yield from _places(value, (*path, key))


def _put(path: tuple[Any, ...], value: Any, content: Any) -> None:
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


def _own() -> Iterator[tuple[str, Change]]:
    def rename_file(new: str) -> Change:
        def change(content: dict[str, Any]) -> None:
            files = content["files"]
            files[new] = files.pop(min(files))

        return change

    for name in ("../x", "/etc/passwd", "/dev/zero", "a/b", "", ".", "..", ".hidden", "a\nb", "\0"):
        yield f"a file called {name!r}", rename_file(name)

    def grow(content: dict[str, Any]) -> None:
        segment = content["segments"][0]
        segment["shard_numel"] = _HUGE
        name, start, _ = segment["slots"][-1]
        segment["slots"][-1] = [name, start, start + _HUGE]
        for param in content["params"]:
            if param["name"] == name:
                param["shape"] = [_HUGE]

    yield "a parameter of 2^40 elements", grow

    def overlap(content: dict[str, Any]) -> None:
        slots = max((s["slots"] for s in content["segments"]), key=len)
        slots[1][1:] = [slots[0][1], slots[0][1] + slots[1][2] - slots[1][1]]

    yield "two parameters in one place", overlap

    def swap(content: dict[str, Any]) -> None:
        slots = max((s["slots"] for s in content["segments"]), key=len)
        first, other = next((a, b) for a in slots for b in slots if a[2] - a[1] != b[2] - b[1])
        first[0], other[0] = other[0], first[0]

    yield "two parameters of other sizes have changed places", swap
    yield "a parameter without a slot", lambda c: c["segments"][0]["slots"].pop()
    yield "a parameter twice", lambda c: c["params"].append(c["params"][0])
    yield "a segment twice", lambda c: c["segments"].append(c["segments"][0])
    yield "a segment less", lambda c: c["segments"].pop()
    yield "a rank less", lambda c: c["python_rng"].pop()
    yield "more ranks", lambda c: c.update(world_size=c["world_size"] + 1)
    yield "a million ranks", lambda c: c.update(world_size=10**6)
    yield "another optimizer", lambda c: c.update(optimizer="Lion with 1 groups")
    yield "a state twice", lambda c: c["states"].append(c["states"][0])
    yield "a state more", lambda c: c["states"].append("evil")
    yield "a state of a path", lambda c: c["states"].append("../evil")
    yield "no master weights", lambda c: c["states"].remove("master_weight")
    yield "a member more", lambda c: c.update(evil=1)
    yield "no numbers", lambda c: c.update(scalars={})
    yield "numbers of nobody", lambda c: c["scalars"].update(nobody={"num_steps": 1})
    yield "a whole state", lambda c: c.update(whole_states={"nobody": {"file": "x", "state": {}}})
    yield "parameters as hyperparameters", lambda c: _groups(c)[0].update(params=[])
    yield "a rate of NaN", lambda c: _groups(c)[0].update(lr=float("nan"))
    yield "no rate", lambda c: _groups(c)[0].update(lr=None)
    yield "no betas", lambda c: _groups(c)[0].update(betas=None)
    yield "three betas", lambda c: _groups(c)[0].update(betas=[0.9, 0.9, 0.9])
    yield "an infinite decay", lambda c: _groups(c)[0].update(weight_decay=float("inf"))
    yield "a strange NaN", lambda c: _groups(c)[0].update(strange=float("nan"))
    yield "a rate of text", lambda c: _groups(c)[0].update(lr="x")
    yield "betas of text", lambda c: _groups(c)[0].update(betas=["a", "b"])
    yield "a schedule of text", lambda c: c["progress"].update(lr_scheduler="x")
    yield "a schedule of nothing", lambda c: c["progress"].update(lr_scheduler={})
    count = {"last_batch_iteration": "x"}
    yield "a count of text", lambda c: c["progress"].update(lr_scheduler=count)
    yield "a scale of 0", lambda c: c["progress"].update(loss_scaler={"scale": 0.0})
    for name, value in (
        ("a tensor of another size", {"__tensor__": ["float32", [_HUGE], [1.0]]}),
        ("a tensor of no dtype", {"__tensor__": ["nn", [1], [1.0]]}),
        ("a tensor of text", {"__tensor__": ["float32", [1], ["x"]]}),
        ("a tensor of nothing", {"__tensor__": 3}),
        ("a mapping with lists as keys", {"__mapping__": [[[1], 2]]}),
        ("a mapping of numbers", {"__mapping__": [1, 2]}),
        ("a tuple of a number", {"__tuple__": 1}),
        ("a counter of text", {"__counter__": "x"}),
    ):
        yield f"a client state with {name}", lambda c, v=value: c.update(client_state={"x": v})
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    yield "300 lists in lists", lambda c: c.update(client_state={"x": deep})


def _groups(content: dict[str, Any]) -> Any:
    return content["progress"]["param_groups"]


def _replace(place: Path, name: str, make: Callable[[Path], object]) -> None:
    path = place / name
    path.unlink()
    make(path)


_WEIGHTS = "master_weight-00000.safetensors"
_BUFFERS = "buffers.safetensors"
_RNG = "rng-00000.safetensors"
READERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "read_weights": (lambda folder: list(read_weights(folder)), (MANIFEST, _WEIGHTS)),
    "read_buffers": (read_buffers, (MANIFEST, _BUFFERS)),
    "verify_checkpoint": (zero_core.verify_checkpoint, (MANIFEST, _WEIGHTS, _BUFFERS, _RNG)),
}
"""Functions that read a checkpoint, with the files that each must refuse when they are damaged."""


def folders() -> Iterator[tuple[str, str, Callable[[Path], object]]]:
    """Yield a file's name, a description, and a function that damages the file in a checkpoint."""
    for name in (MANIFEST, _WEIGHTS, _BUFFERS, _RNG):
        for what, change in _ways(name):
            yield name, f"{name} {what}", change
    for one, two in itertools.combinations((_WEIGHTS, _BUFFERS, _RNG), 2):
        yield one, f"{one} and {two} have changed places", lambda p, n=(one, two): _swap(p, *n)
    for text in (b"[" * 10**5, b'{"a":' * 10**5, b"{", b"\xff" * 99, b"null", b"[]", b'"x"'):
        what = f"a manifest {text[:9]!r}..."
        yield MANIFEST, what, lambda p, t=text: (p / MANIFEST).write_bytes(t)
    for header in (b"[" * 10**5, b'{"a":' * 10**5, b"null", b"{}", b'{"0": 1}'):
        what = f"a header {header[:9]!r}..."
        yield _WEIGHTS, what, lambda p, h=header: _with_header(p, len(h), h)
    yield _WEIGHTS, "a header of 2^63 bytes", lambda p: _with_header(p, 2**63, b"{}")


def _ways(name: str) -> Iterator[tuple[str, Callable[[Path], object]]]:
    yield "is a pipe", lambda p: _replace(p, name, os.mkfifo)
    yield "is missing", lambda p: (p / name).unlink()
    yield "is a folder", lambda p: _replace(p, name, Path.mkdir)
    yield "is a device", lambda p: _replace(p, name, lambda path: path.symlink_to("/dev/zero"))
    yield "is a link", lambda p: _link_to_copy(p, name)
    yield "is empty", lambda p: (p / name).write_bytes(b"")
    yield "is 2^40 bytes long", lambda p: os.truncate(p / name, _HUGE)


def _swap(place: Path, one: str, two: str) -> None:
    first = (place / one).read_bytes()
    (place / two).replace(place / one)
    (place / two).write_bytes(first)


def _link_to_copy(place: Path, name: str) -> None:
    copy = place.parent / f"copy-of-{name}"
    copy.write_bytes((place / name).read_bytes())
    _replace(place, name, lambda path: path.symlink_to(copy))


def _with_header(place: Path, size: int, header: bytes) -> None:
    """Replace the weights' file, with the right size and checksum in the manifest."""
    data = size.to_bytes(8, "little") + header
    (place / _WEIGHTS).write_bytes(data)
    facts = {"bytes": len(data), "crc32": [zlib.crc32(data)]}
    rewrite(place, lambda content: content["files"].update({_WEIGHTS: facts}))


TAGS = ("../x", "/etc", "a/b", "..", ".", "", ".x", "a\nb", "a\0b", "x" * 300, "latest", "a\\b")
"""Tags that no checkpoint may have."""


def build(
    stage: int, *, is_offloaded: bool = False, process_group: SimulatedRanks | None = None
) -> zero_core.Engine:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    config = Case(stage, top={"scheduler": scheduler}).config()
    if is_offloaded:
        config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
    return zero_core.build(make_model(), config, process_group=process_group)


def rewrite(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest with ``change`` and recompute the manifest's digest."""
    content = json.loads(place.joinpath(MANIFEST).read_bytes())
    change(content)
    place.joinpath(MANIFEST).write_bytes(seal(content))


def digest(engine: zero_core.Engine) -> str:
    """Return a digest of this rank's weights, states, buffers, groups, counters and RNGs."""
    found = hashlib.sha256()
    state = engine.sharded_state

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        else:
            found.update(repr(value).encode())

    for segment in state.layout.segments:
        add(state.own_state(segment.index))
        if segment.is_trainable:
            for name in ("exp_avg", "exp_avg_sq"):
                add(state.own_state(segment.index, name))
    for index in range(len(state.pieces)):
        add(sorted(state.tier.read_scalars(index).items()))
    for name, buffer in sorted(state.buffers().items()):
        add(name)
        add(buffer)
    for group in engine.optimizer.param_groups:
        add(sorted((k, repr(v)) for k, v in group.items() if k != "params"))
    assert engine.lr_scheduler is not None
    add(sorted(engine.lr_scheduler.state_dict().items()))
    add((engine.global_steps, engine.skipped_steps, engine.micro_steps, random.getstate()))
    add(torch.get_rng_state())
    return found.hexdigest()


def _save(ranks: SimulatedRanks | None, folder: str, stage: int, is_offloaded: bool) -> None:
    engine = build(stage, is_offloaded=is_offloaded, process_group=ranks)
    train(engine, [batch(step, 0, engine.rank) for step in range(2)])
    engine.save_checkpoint(folder, "t", {"epoch": 1})
    engine.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    _save(None, str(folder), 0, False)
    return folder


@pytest.fixture(scope="module")
def engine(saved: Path) -> Iterator[zero_core.Engine]:
    engine = build(0)
    train(engine, [batch(0, 0, engine.rank)])
    yield engine
    engine.close()


def _manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "t" / MANIFEST).read_bytes())
    return content


def _refused(engine: zero_core.Engine, folder: Path, tag: str | None = None) -> str:
    """Load a checkpoint that must be refused. Return what went wrong, or an empty string."""
    before, began = digest(engine), time.perf_counter()
    with _little_memory():
        why = _result(engine.load_checkpoint, folder, tag)
    seconds = time.perf_counter() - began
    if not why and digest(engine) != before:
        return "was written into the engine"
    return why or (f"took {seconds} s" if seconds > _MAX_S else "")


_READ = "was not refused"


def _result(read: Callable[..., object], *arguments: object) -> str:
    """Read a checkpoint that must be refused. Return what went wrong, or an empty string."""
    try:
        read(*arguments)
        return _READ
    except zero_core.CheckpointError as error:
        is_large = "alloc" in str(error) or "MemoryError" in str(error)
        return f"asked for memory: {error}" if is_large else ""
    except Exception as error:
        return f"raised {error!r:.200}"


@contextmanager
def _little_memory() -> Iterator[None]:
    """Limit the growth of this process's mapped memory, torch's included, to `_MAX_BYTES`."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MAX_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_forged_manifests_with_a_valid_digest_are_refused(saved, engine, tmp_path):
    with _little_memory(), pytest.raises(RuntimeError, match="alloc"):
        # Checks that the limit holds for torch's allocations, too.
        torch.empty(_NEVER_FREE, dtype=torch.uint8)
    found, count = [], 0
    for name, change in manifests(_manifest(saved)):
        folder = tmp_path / str(count)
        shutil.copytree(saved, folder)
        rewrite(folder / "t", change)
        why = _refused(engine, folder)
        found += [f"{name}: {why}"] if why else []
        count += 1
        shutil.rmtree(folder)
    print(f"{count - len(found)} of {count} hostile manifests were refused")
    assert count >= 200
    assert not found, "\n".join(found)


def test_files_that_are_not_checkpoints_are_refused(saved, engine, tmp_path):
    found, count = [], 0
    for file, name, change in folders():
        folder = tmp_path / str(count)
        shutil.copytree(saved, folder)
        change(folder / "t")
        why = _refused(engine, folder)
        found += [f"{name}: {why}"] if why else []
        for reader, (read, refused) in READERS.items():
            why = _result(read, folder)
            if why and (why != _READ or file in refused):
                found.append(f"{name}, {reader}: {why}")
        count += 1
        shutil.rmtree(folder)
    print(f"{count - len(found)} of {count} hostile folders were refused")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_outside_the_folder_is_refused(saved, engine, tmp_path, tag):
    folder = tmp_path / "inside"
    shutil.copytree(saved, folder)
    shutil.copytree(saved / "t", tmp_path / "x")
    assert not _refused(engine, folder, tag)
    folder.joinpath("latest").write_text(tag)
    assert not _refused(engine, folder)
    with pytest.raises(zero_core.CheckpointError):
        engine.save_checkpoint(folder, tag)


def test_a_save_over_a_checkpoint_on_a_full_disk_leaves_it_as_it_was(saved, engine, tmp_path):
    folder = tmp_path / "full"
    shutil.copytree(saved, folder)
    before = {file.name: file.read_bytes() for file in folder.joinpath("t").iterdir()}
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(map(len, before.values()))
    for twelfths in range(12):
        resource.setrlimit(resource.RLIMIT_FSIZE, (twelfths * size // 12, most))
        try:
            with pytest.raises(zero_core.CheckpointError):
                engine.save_checkpoint(folder, "t")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        zero_core.verify_checkpoint(folder)
        assert {f.name: f.read_bytes() for f in folder.joinpath("t").iterdir()} == before


def _loads(ranks: SimulatedRanks, folder: str, stage: int, is_offloaded: bool) -> None:
    """Check that both ranks refuse hostile manifests and that no state changes."""
    engine = build(stage, is_offloaded=is_offloaded, process_group=ranks)
    train(engine, [batch(0, 0, engine.rank)])
    control = engine.sharded_state.control
    before, found = digest(engine), []
    for number, (name, change) in enumerate(manifests(_manifest(Path(folder, "saved")))):
        if number % 7 and "client" not in name and "progress" not in name:
            continue
        place = Path(folder, f"copy-{number}")
        if ranks.rank == 0:
            shutil.copytree(Path(folder, "saved"), place)
            rewrite(place / "t", change)
        control.barrier()
        if why := _result(engine.load_checkpoint, place):
            found.append(f"{name}: {why}")
        if digest(engine) != before:
            found.append(f"{name}: written")
            before = digest(engine)
    engine.close()
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("stage", "is_offloaded"),
    [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)],
)
def test_a_refused_load_has_written_nothing_on_two_ranks(tmp_path, stage, is_offloaded):
    simulate(_save, 2, str(tmp_path / "saved"), stage, is_offloaded)
    simulate(_loads, 2, str(tmp_path), stage, is_offloaded)


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.frozen(self.line(x))).square().mean()


def _build_small() -> zero_core.Engine:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}}
    return zero_core.build(_Small(), config)


@pytest.fixture(scope="module")
def saved_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = _build_small()
    engine.backward(engine(torch.randn(4, 3)))
    engine.step()
    folder = tmp_path_factory.mktemp("bytes")
    engine.save_checkpoint(folder, "t", {"epoch": 1})
    engine.close()
    return folder


def _check(path: Path, readers: list[Callable[[], object]]) -> None:
    """Change each byte of a file, and the file's length. All readers must refuse each variant."""
    data, wrong, count = path.read_bytes(), [], 0
    flips = [(at, mask) for at in range(len(data)) for mask in (1 << at % 8, 0xFF)]
    changed = [
        (f"byte {at} ^ {m}", data[:at] + bytes([data[at] ^ m]) + data[at + 1 :]) for at, m in flips
    ]
    changed += [(f"cut at {at}", data[:at]) for at in range(0, len(data), 7)]
    changed += [(f"{tail!r} appended", data + tail) for tail in (b"\0", b"\n", b" ", b"}", data)]
    for name, found in changed:
        path.write_bytes(found)
        for number, read in enumerate(readers):
            count += 1
            if why := _result(read):
                wrong.append(f"{path.name}, {name}, reader {number}: {why}")
    path.write_bytes(data)
    print(f"{path.name}: {count - len(wrong)} of {count} reads were refused")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("file", ["manifest.json", "*.safetensors"])
def test_every_byte_of_every_file(file: str, saved_step: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved_step, tmp_path / "copy"))
    engine = _build_small()
    further: dict[str, Callable[[], object]] = {
        MANIFEST: lambda: read_client_state(folder),
        _WEIGHTS: lambda: list(read_weights(folder)),
        "value-00000.safetensors": lambda: list(read_weights(folder)),
        _BUFFERS: lambda: read_buffers(folder),
    }
    for path in sorted(folder.joinpath("t").glob(file)):
        also = [further[path.name]] if path.name in further else []
        _check(path, [lambda: engine.load_checkpoint(folder), *also])
    engine.load_checkpoint(folder)
    engine.close()


SCRIPT = str(Path(__file__).with_name("saving_program.py"))
STEPS = 40
KILLS = 12


def _saving_program(folder: Path) -> tuple[str, ...]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return (*launcher, SCRIPT, str(folder), str(STEPS))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {weight.names[0]: weight.value for weight in read_weights(folder)}


def _newest(folder: Path) -> str:
    return find(folder, None).name if folder.joinpath("latest").exists() else ""


def test_killed_at_any_moment_the_newest_checkpoint_is_whole_and_training_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    complete(*_saving_program(tmp_path / "straight"))
    folder, moments = tmp_path / "killed", random.Random(0)
    for _ in range(KILLS):
        before = _newest(folder)
        with Program(*_saving_program(folder)) as program:
            program.wait_for(lambda before=before: _newest(folder) != before)
            time.sleep(moments.uniform(0.0, 0.1))
            program.kill_all()
        found = _newest(folder)
        assert _weights(folder), found
        if found == f"step-{STEPS}":
            break
    complete(*_saving_program(folder))
    assert _newest(folder) == f"step-{STEPS}"
    theirs = _weights(tmp_path / "straight")
    for name, value in _weights(folder).items():
        assert torch.equal(value, theirs[name]), name
    left = list(folder.glob(".*"))  # marker files of ranks, which are removed after a day
    assert all(path.is_file() and not path.stat().st_size for path in left), left
