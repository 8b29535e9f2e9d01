"""Import of DeepSpeed checkpoints, made here by torch.save: malicious files and file formats.

integration/compat/checks/test_import_deepspeed.py imports checkpoints that DeepSpeed wrote.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_here
from torch import Tensor, nn

from tests.support.deepspeed_files import (
    GROUP,
    SHAPES,
    STATES,
    deepspeed_classes,
    instance,
    model_states,
    values,
    write_stage_2,
)
from zero_core import CheckpointError
from zero_core.checkpoint.files import Reader, read_buffers, read_weights
from zero_core.checkpoint.manifest import read_manifest
from zero_core.errors import CheckpointCorruptError
from zero_engine import deepspeed
from zero_engine.deepspeed_import.child import die_with_parent, leave_network, limit
from zero_engine.deepspeed_import.importing import (
    find_place,
    import_checkpoint,
    printable,
    read_source,
    write_source,
)
from zero_engine.deepspeed_import.source import MASTER, load_file, read_universal


class Model(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.last = nn.Parameter(torch.ones(2))
        self.tied = self.last
        self.register_buffer("seen", torch.tensor(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.first(x) * self.frozen).sum() * (self.last + self.tied).sum()
        return y


@pytest.fixture
def classes() -> Iterator[dict[str, type]]:
    with deepspeed_classes() as found:
        yield found


def read_into(source: Path, output: Path, frozen: tuple[str, ...] = ()) -> Path:
    """Import in this process, which is faster than in the sandboxed one."""
    place = find_place(source, None)
    return write_source(read_source(place, frozen), output, place.name, None)


def check_values(output: Path, expected: dict[str, dict[str, Tensor]]) -> None:
    manifest = read_manifest(output / "global_step4")
    reader = Reader(output / "global_step4", manifest)
    for name, by_state in expected.items():
        for state, value in by_state.items():
            found = reader.read_parts(reader.parts(state, name, 0, value.numel()))
            assert torch.equal(found, value.reshape(-1)), (name, state)
    by_name = {weight.names[0]: weight for weight in read_weights(output)}
    assert by_name["last"].names == ("last", "tied")
    assert not by_name["frozen"].is_trainable
    assert torch.equal(by_name["frozen"].value, torch.arange(3.0))
    assert read_buffers(output)["seen"] == 5


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_fragments_of_any_number_of_ranks_are_joined(num_ranks, classes, tmp_path):
    write_stage_2(tmp_path / "saved" / "global_step4", classes, num_ranks)
    read_into(tmp_path / "saved", tmp_path / "out")
    check_values(tmp_path / "out", values())


def test_command_writes_what_the_engine_loads(classes, tmp_path, capfd):
    write_stage_2(tmp_path / "saved" / "global_step4", classes, 2)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True, "loss_scale_window": 4},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    with pytest.raises(CheckpointError, match=r"zero-engine import .*from_deepspeed"):
        engine.load_checkpoint(tmp_path / "saved")
    _, client_state = engine.load_checkpoint(tmp_path / "saved", from_deepspeed=tmp_path / "new")
    assert client_state == {"epoch": (7, {"best": torch.tensor([0.5])})}
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (4, 1, 32)
    assert engine.lr_scheduler.state_dict() == {"last_batch_iteration": 3}
    assert (engine.optimizer.param_groups[0]["lr"], engine.optimizer.loss_scale) == (0.01, 64.0)
    for name, value in values().items():
        param = model.get_parameter(name)
        moment = deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg_sq")
        assert torch.equal(moment, value["exp_avg_sq"]), name
    with pytest.raises(CheckpointError, match="holds checkpoints, but no other"):
        engine.load_checkpoint(tmp_path / "saved", "other", from_deepspeed=tmp_path / "new")
    engine.save_checkpoint(tmp_path / "new", "later")
    place, _ = engine.load_checkpoint(tmp_path / "saved", from_deepspeed=tmp_path / "new")
    assert place == str(tmp_path / "new" / "later")
    assert (tmp_path / "new" / "latest").read_text().strip() == "later"
    engine.destroy()
    assert "reading" in capfd.readouterr().err


def _write_stage_0(folder: Path, module: dict[str, Tensor], optimizer: Any, **more: Any) -> None:
    folder.mkdir()
    folder.parent.joinpath("latest").write_text(folder.name)
    absent = {"shared_params": None, "param_shapes": None}
    content = model_states(module=module, optimizer=optimizer, **absent, **more)
    torch.save(content, folder / "mp_rank_00_model_states.pt")


def _by_number(order: list[str], step: Any = 4) -> dict[int, dict[str, Any]]:
    return {
        i: {"step": step, **{s: values()[n][s] for s in STATES[1:]}} for i, n in enumerate(order)
    }


def test_names_of_stage_0_in_fp32_follow_from_shapes_or_are_asked_for(tmp_path: Path) -> None:
    order = ["last", "first.weight", "first.bias"]
    module = {**model_states()["module"], **{n: values()[n][MASTER] for n in order}}
    module["tied"] = module["last"]
    state = _by_number(order, torch.tensor(4.0))
    saved = {"state": state, "param_groups": [{**GROUP, "params": [0, 1, 2]}]}
    _write_stage_0(tmp_path / "global_step4", module, saved)
    with pytest.raises(CheckpointError, match=r"\['frozen', 'first.bias'\] have the shape \(3,\)"):
        read_into(tmp_path, tmp_path / "out")
    read_into(tmp_path, tmp_path / "out", frozen=("frozen",))
    check_values(tmp_path / "out", values())


@pytest.mark.parametrize("is_flat", [True, False])
def test_names_of_stage_0_in_16_bits_follow_from_master_weights(is_flat, tmp_path):
    expected = values()
    order = ["last", "first.weight", "first.bias"]
    masters: dict[str, Any]
    if is_flat:
        whole = {s: torch.cat([expected[n][s].reshape(-1) for n in order]) for s in STATES}
        state = {0: {"step": 4, **{s: whole[s] for s in STATES[1:]}}}
        masters = {"fp32_groups_flat": [whole[MASTER]]}
    else:
        order = ["first.bias", "last", "first.weight"]
        state = _by_number(order)
        masters = {"fp32_groups": [[expected[n][MASTER] for n in order]]}
    rounded = {n: expected[n][MASTER].bfloat16() for n in order}
    module = {**model_states()["module"], **rounded, "tied": rounded["last"]}
    inner = {"state": state, "param_groups": [{**GROUP, "params": list(state)}]}
    saved = {"dynamic_loss_scale": False, "optimizer_state_dict": inner, **masters}
    _write_stage_0(tmp_path / "global_step4", module, saved)
    read_into(tmp_path / "global_step4", tmp_path / "out")
    check_values(tmp_path / "out", expected)


@pytest.mark.parametrize("groups", [[[0, 1]], [[0], [1]]])
def test_master_weights_that_round_to_several_parameters_are_refused(groups, tmp_path):
    weights = {f"ln{i}.weight": torch.ones(4, dtype=torch.bfloat16) for i in range(3)}
    masters = [torch.full((4,), 1.001), torch.full((4,), 1.002)]
    state = {i: {"step": 4, **dict.fromkeys(STATES[1:], torch.ones(4))} for i in range(2)}
    inner = {"state": state, "param_groups": [{**GROUP, "params": group} for group in groups]}
    saved = {
        "optimizer_state_dict": inner,
        "fp32_groups": [[masters[i] for i in group] for group in groups],
    }
    _write_stage_0(tmp_path / "t", weights, saved, buffer_names=[])
    with pytest.raises(CheckpointError, match=r"rounds to the weights of 3 .*'ln0.weight'"):
        read_source(tmp_path / "t", ())
    with pytest.raises(CheckpointError, match="rounds to the weights of 2"):
        read_source(tmp_path / "t", ("ln0.weight",))


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_nothing_that_is_there_is_replaced(classes: dict[str, type], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    place = saved / "global_step4"
    write_stage_2(place, classes, 1)
    (place / "mine.txt").write_text("notes")
    (tmp_path / "link").symlink_to(saved)
    before = _bytes_of(saved)
    for source, output in (
        (saved, saved),
        (place, saved),
        (tmp_path / "link", saved),
        (saved, tmp_path / "link"),
        (saved, place),
        (place, place / "imported"),
    ):
        with pytest.raises(CheckpointError, match="would replace DeepSpeed's checkpoint"):
            import_checkpoint(source, output)
    (tmp_path / "other" / "global_step4").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is there already, something else"):
        import_checkpoint(saved, tmp_path / "other")
    write_stage_2(tmp_path / "third" / "global_step9", classes, 1)
    with pytest.raises(CheckpointError, match="of another program"):
        import_checkpoint(saved, tmp_path / "third")
    run_here("import", str(saved), str(saved), expected_code=2)
    # From Python 3.14 on, the overlong name counts as a missing folder.
    with pytest.raises(CheckpointError, match=r"not imported.*too long|there is no folder .*xxx"):
        import_checkpoint(saved, tmp_path / "new", "x" * 300)
    assert _bytes_of(saved) == before
    read_into(saved, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is there already, a checkpoint"):
        import_checkpoint(saved, tmp_path / "out")


def test_second_import_leaves_latest_alone(classes, tmp_path, capsys):
    write_stage_2(tmp_path / "saved" / "global_step4", classes, 1)
    source = read_source(tmp_path / "saved" / "global_step4", ())
    write_source(source, tmp_path / "out", "first", None)
    write_source(source, tmp_path / "out", "second", None)
    assert (tmp_path / "out" / "latest").read_text().strip() == "first"
    assert "still names first" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="made meanwhile"):
        write_source(source, tmp_path / "out", "first", None)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"global_steps": None}, "not as DeepSpeed writes"),
        ({"global_steps": float("inf")}, "not as DeepSpeed writes"),
        ({"skipped_steps": -1}, "skipped_steps = -1"),
        ({"buffer_names": ["seen", "ds"], "module": {"ds": "text"}}, "buffer ds is no dense"),
        ({"lr_scheduler": {"a": {1, 2}}}, "lr_scheduler"),
        ({"ds_config": {"optimizer": {"type": 3}}}, "has no type"),
        ({"ds_config": {"optimizer": {"type": "Lamb"}}}, "of the optimizer Lamb"),
    ],
)
def test_malformed_values_are_refused_before_anything_is_written(changed, match, classes, tmp_path):
    folder = tmp_path / "saved" / "global_step4"
    write_stage_2(folder, classes, 1)
    content = model_states()
    content["module"] |= changed.get("module", {})
    content |= {key: value for key, value in changed.items() if key != "module"}
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=match):
        read_into(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class _Call:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("hostile", "match"),
    [
        (lambda mark: _Call(os.system, f"touch {mark}"), "posix.system"),
        (lambda mark: [{"a": (1, _Call(os.mkdir, mark))}], "posix.mkdir"),
        (lambda mark: _Call(eval, f"open({mark!r}, 'w')"), "builtins.eval|names eval"),
        (lambda mark: _Call(open, mark, "w"), "io.open"),
        (lambda mark: _Call(__import__, "antigravity"), "__import__"),
        (lambda mark: _Call(subprocess.Popen, ["touch", mark]), "Popen"),
        (Path, "pathlib"),
    ],
)
def test_file_that_names_anything_else_is_refused_with_its_name(hostile, match, tmp_path):
    torch.save({"module": hostile(str(tmp_path / "mark"))}, tmp_path / "states.pt")
    with pytest.raises(CheckpointError, match=match):
        load_file(tmp_path / "states.pt")
    assert not (tmp_path / "mark").exists()


def _with_pickle(path: Path, pickled: bytes | Callable[[bytes], bytes], content: Any = ()) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save(content, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            if name.endswith("data.pkl"):
                data = pickled if isinstance(pickled, bytes) else pickled(data)
            archive.writestr(name, data)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02cdeepspeed.os\nsystem\n(X\x04\x00\x00\x00trueo.",  # the OBJ opcode calls a class
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + b"\xff" * 7 + b"\x7f\x85R.",  # allocates 8 EB
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"\x80\x02X\xff\xff\xff\x7fabc.",  # a length beyond the end of the file
        b"\x80\x02" + b"]" * 100,  # no STOP opcode
        b"(" * 100_000,
        b"",
        lambda data: data.replace(b"K\x07", b"J\x00\x00\x00\x10"),  # more elements than bytes
    ],
)
def test_instructions_that_torch_save_does_not_write_are_refused(pickled, tmp_path):
    _with_pickle(tmp_path / "a.pt", pickled, torch.zeros(7))
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        load_file(tmp_path / "a.pt")


def test_other_and_damaged_files_are_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("no pickle")
    os.mkfifo(tmp_path / "pipe.pt")
    for name in ("old", "text", "pipe"):
        with pytest.raises(CheckpointCorruptError, match=f"{name}.pt is not"):
            load_file(tmp_path / f"{name}.pt")
    with pytest.raises(CheckpointError, match="there is no file"):
        load_file(tmp_path / "none.pt")
    path = tmp_path / "a.pt"
    torch.save({"a": torch.full((100,), 1.0)}, path)
    data = path.read_bytes()
    at = data.index(torch.full((100,), 1.0).numpy().tobytes())
    for position in (at, at + 199, at + 399):
        path.write_bytes(data[:position] + b"\x07" + data[position + 1 :])
        with pytest.raises(CheckpointCorruptError, match=r"a\.pt is damaged: .*data/0"):
            load_file(path)


def test_missing_rank_and_foreign_forms_are_told(classes: dict[str, type], tmp_path: Path) -> None:
    folder = tmp_path / "global_step4"
    write_stage_2(folder, classes, 3)
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointCorruptError, match="no file of rank 1"):
        read_source(folder, ())
    (folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointCorruptError, match="of 1 ranks, 3 wrote it"):
        read_source(folder, ())
    (folder / "layer_0_expert_1_mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="mixtures of experts"):
        read_source(folder, ())
    for tag in ("..", "a/b", "/etc"):
        with pytest.raises(CheckpointError, match="is no tag"):
            find_place(tmp_path, tag)
    with pytest.raises(CheckpointError, match="neither a file 'latest'"):
        find_place(tmp_path / "nothing", None)


_PAIRS = [b"q%ch%c\x86" % (i, i) for i in range(120)]
"""Pickle instructions. Each replaces the value on top of the stack by a pair that has it twice."""
# Two equal dict keys, each a tuple of 60 nested pairs. Hashing takes 2^60 steps before Python 3.14,
# which caches tuple hashes. Comparing the keys takes 2^60 steps in any version.
_ENDLESS = b"".join([b"\x80\x02})", *_PAIRS[:60], b"Ns)", *_PAIRS[60:], b"Ns."])


def test_reader_has_no_network(tmp_path: Path) -> None:
    if os.fork() == 0:
        os._exit(0 if leave_network() else 1)
    if os.wait()[1] != 0:
        pytest.skip("this system permits no network namespace, which the reader says")
    _with_pickle(tmp_path / "global_step4" / "mp_rank_00_model_states.pt", _ENDLESS)
    request = {"place": str(tmp_path / "global_step4"), "frozen": [], "parent": os.getpid()}
    command = [sys.executable, "-P", "-m", "zero_engine.deepspeed_import.child"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write(json.dumps(request))
        child.stdin.close()
        said = child.stderr.readline()
        process = Path(f"/proc/{child.pid}")
        networks = {os.readlink(thread / "ns" / "net") for thread in process.glob("task/*")}
        interfaces = (process / "net" / "dev").read_text().splitlines()[2:]
        child.kill()
    assert said.startswith("reading "), said
    assert len(networks) == 1
    assert os.readlink("/proc/self/ns/net") not in networks
    # Only the loopback interface exists, and it is down.
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]


def test_file_that_asks_for_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    # bytearray(2**38) exceeds the memory limit of the reader process.
    huge = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + (2**38).to_bytes(5, "little") + b"\x85R."
    _with_pickle(tmp_path / "global_step4" / "mp_rank_00_model_states.pt", huge)
    with pytest.raises(CheckpointError, match="MemoryError"):
        import_checkpoint(
            tmp_path / "global_step4",
            tmp_path / "out",
            frozen=[f"layers.{i}.mlp.experts.weight" for i in range(5000)],
        )
    assert not (tmp_path / "out").exists()


def test_pickle_that_takes_for_ever_ends_with_its_processor_time(tmp_path: Path) -> None:
    _with_pickle(tmp_path / "a.pt", _ENDLESS)
    child = os.fork()
    if child == 0:
        limit(0, spare_s=0)
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
        load_file(tmp_path / "a.pt")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGXCPU


@pytest.mark.parametrize(
    ("line", "ended"),
    [("exec head -c 1000000 /dev/zero", "SIGKILL"), ("echo []", "code 0"), ("echo {", "code 0")],
)
def test_answer_that_the_reader_would_not_give_is_refused(
    line: str, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{line}\n", encoding="ascii")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(CheckpointError, match=f"ended: {ended}"):
        import_checkpoint(tmp_path, tmp_path.parent / "new")


def test_reader_dies_with_its_parent() -> None:
    ends, inlet = os.pipe()
    parent = os.fork()
    if parent == 0:
        ready, is_set = os.pipe()
        if os.fork() == 0:
            die_with_parent(os.getppid())
            os.write(is_set, b".")
            signal.pause()
        os.read(ready, 1)
        os._exit(0)
    os.close(inlet)
    os.waitpid(parent, 0)
    # The pipe closes when the last process that holds its other end exits.
    assert select.select([ends], [], [], 60)[0]
    assert os.read(ends, 1) == b""
    os.close(ends)


def test_elements_of_several_parameters_are_refused(classes, tmp_path):
    folder = tmp_path / "global_step4"
    write_stage_2(folder, classes, 1)
    address = instance(classes["fragment_address"], numel=2, start=0)
    # The master weights of 8 elements are one tensor of 2, listed four times.
    state = {
        "single_partition_of_fp32_groups": [torch.zeros(2)] * 4,
        "param_slice_mappings": [{"last": address}, *[{"first.weight": address}] * 3],
        "base_optimizer_state": {"state": {}, "param_groups": [GROUP]},
        "partition_count": [1],
    }
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": state}, path)
    model = model_states(param_shapes=[{n: SHAPES[n] for n in ("last", "first.weight")}])
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointCorruptError, match="to several parameters"):
        read_source(folder, ())


def test_names_and_links_out_of_a_universal_checkpoint_are_refused(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "t", tmp_path / "private"
    for place in (folder / "zero", elsewhere):
        place.mkdir(parents=True)
    torch.save(torch.zeros(2), elsewhere / "fp32.pt")
    torch.save({"param_groups": [GROUP]}, folder / "zero" / "optimizer_state.pt")
    (folder / "zero" / "linked").symlink_to(elsewhere)
    for name in (str(elsewhere), "../../private", "linked"):
        content = model_states(
            module={name: torch.zeros(2)},
            buffer_names=[],
            shared_params={},
            param_shapes=[{name: (2,)}],
        )
        torch.save(content, folder / "mp_rank_00_model_states.pt")
        with pytest.raises(CheckpointCorruptError, match="no folder of its own"):
            read_universal(folder)
    (tmp_path / "link.pt").symlink_to(elsewhere / "fp32.pt")
    with pytest.raises(CheckpointCorruptError, match="links are not followed"):
        load_file(tmp_path / "link.pt")


def test_names_of_a_file_reach_the_terminal_without_escape_sequences() -> None:
    assert printable("a\x1b[2Jb") == "a\\x1b[2Jb"
    assert len(printable("x" * 10**6)) < 5000
