"""Forged manifests with a valid digest, and files that are not checkpoints."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from faults.checkpoints.small_checkpoints import rewrite
from zero_core.checkpoint.manifest import MANIFEST

BAD: tuple[Any, ...] = (None, True, -1, 2**63, 1e400, "x" * 50, [], {}, [[]], "../../etc/passwd")
"""Values that hardly any entry of a manifest may have."""
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
    ("param_groups", "[]"),  # the engine keeps its own groups if the checkpoint has another number
}
"""Last key of a path and value of `BAD`, as JSON, that a manifest may hold."""


def manifests(content: dict[str, Any]) -> Iterator[tuple[str, Change]]:
    """Yield a name and an edit of a manifest like ``content``.

    Each edited manifest must be refused.
    """
    num_steps = ("scalars", min(content["scalars"]), "num_steps")
    for path in (*_places(content), num_steps):
        for bad in BAD:
            text = json.dumps(bad)
            if (path[-1], text) not in ALLOWED:
                yield f"{'.'.join(map(str, path))} = {text[:30]}", partial(_put, path, bad)
    yield from _own()


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all entries. Of a list or a table of names only the first entry counts."""
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
FILES_OF = {
    "read_weights": (MANIFEST, _WEIGHTS),
    "read_buffers": (MANIFEST, _BUFFERS),
    "verify_checkpoint": (MANIFEST, _WEIGHTS, _BUFFERS, _RNG),
}
"""Files that each reader must refuse when they are damaged."""


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
