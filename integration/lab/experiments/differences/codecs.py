"""Codecs for the weight differences of recorded training steps: size and single-thread speed.

A GPT-2 in bf16 over fp32 master weights is trained from scratch with warm-up and decay, then
fine-tuned at several learning rates. The weights before and after some steps are recorded. Codecs
other than zero-comm's get the exclusive or of the two, which has the most zeros.

[Note: figures]
entropy   entropy of the differences as ordered integers, in bits per weight. No codec that encodes
          differences one at a time can be smaller
bits      size of the encoded difference in bits per weight
encode,   bytes of the 16-bit weights per second, fastest of several calls. The time of computing
decode    the exclusive or is not included
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.models import Gpt, GptShape
from benchmarks.harness.ranks import Row
from zero_comm import apply_difference, encode_difference
from zero_engine.train.data import Corpus

SHAPE = GptShape(layers=4, width=256, heads=4, vocab=2048, context=128)
"""3.7 million parameters."""
FROM_NOTHING = 3e-4
"""Learning rate of the training from which the fine-tunings start."""
FINE_TUNING = (1e-6, 1e-5, 2e-5)
MICRO_BATCH = 8
_NUM_CALLS = 7
OURS = "zero-comm"


@dataclass(frozen=True)
class Recorded:
    """Weights before and after one step, flat and in bf16."""

    name: str
    learning_rate: float
    old: Tensor
    new: Tensor


def record(corpus: Corpus, steps: int) -> Iterator[Recorded]:
    """Train, and yield steps at the start, at the learning rate's peak, midway and at the end."""
    torch.manual_seed(0)
    shape = replace(SHAPE, vocab=corpus.vocab_size, context=corpus.train.shape[1])
    model = Gpt(shape).bfloat16()
    masters = [param.detach().float() for param in model.parameters()]
    yield from _train(model, masters, corpus, "from nothing", FROM_NOTHING, steps)
    for lr in FINE_TUNING:
        copies = [master.clone() for master in masters]
        yield from _train(model, copies, corpus, f"fine-tuning at {lr:g}", lr, steps // 5)


def _train(
    model: nn.Module, masters: Sequence[Tensor], corpus: Corpus, name: str, lr: float, steps: int
) -> Iterator[Recorded]:
    params, warmup = list(model.parameters()), max(1, steps // 10)
    with torch.no_grad():
        for param, master in zip(params, masters, strict=True):
            param.copy_(master)
    optimizer = torch.optim.AdamW(masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    moments = {0: "first step", warmup: "peak", steps // 2: "half", steps - 1: "end"}
    for step in range(steps):
        share = min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = lr * share
        ids = corpus.batch(step, rank=0, world_size=1, micro_batch_size=MICRO_BATCH)
        model(ids).backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        old = torch.cat([param.detach().flatten() for param in params])
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        if step in moments:
            new = torch.cat([param.detach().flatten() for param in params])
            yield Recorded(f"{name}, {moments[step]}", lr * share, old, new)


def compare(step: Recorded) -> Row:
    """Return the figures of all codecs on one recorded step. See [Note: figures]."""
    old, new = step.old, step.new
    changed = float((old.view(torch.int16) != new.view(torch.int16)).float().mean())
    about = {"learning_rate": step.learning_rate, "std": float(old.float().std())}
    found = {name: codec(old, new) for name, codec in _CODECS.items()}
    return {**about, "changed": changed, "entropy": _entropy(old, new), "codecs": found}


def _entropy(old: Tensor, new: Tensor) -> float:
    a, b = (_ordered(x.view(torch.int16).int()) for x in (old, new))
    _, counts = torch.unique(b - a, return_counts=True)
    shares = counts.double() / counts.sum()
    return float(-(shares * shares.log2()).sum())


def _ordered(bits: Tensor) -> Tensor:
    return torch.where(bits < 0, -(bits & 0x7FFF) - 1, bits)


def _ours(old: Tensor, new: Tensor) -> Row:
    encoded, values = encode_difference(old, new), old.clone()
    apply_difference(values, encoded)
    assert torch.equal(values.view(torch.int16), new.view(torch.int16))

    def decode() -> None:  # each call changes `values`, but not the time of decoding
        apply_difference(values, encoded)

    return _figures(old, len(encoded), lambda: encode_difference(old, new), decode)


def _of_bytes(compress: Callable[[bytes], bytes], expand: Callable[[bytes], bytes]) -> Any:
    def measure(old: Tensor, new: Tensor) -> Row:
        data = (old.view(torch.int16) ^ new.view(torch.int16)).numpy().tobytes()
        encoded = compress(data)
        assert expand(encoded) == data
        return _figures(old, len(encoded), lambda: compress(data), lambda: expand(encoded))

    return measure


def _copy(old: Tensor, new: Tensor) -> Row:
    target = torch.empty_like(old)
    return _figures(old, old.nbytes, lambda: target.copy_(new), lambda: target.copy_(new))


def _figures(
    old: Tensor, nbytes: int, encode: Callable[[], object], decode: Callable[[], object]
) -> Row:
    speeds = [old.nbytes / _fastest(call) for call in (encode, decode)]
    return {"bits": 8 * nbytes / old.numel(), "encode": speeds[0], "decode": speeds[1]}


def _fastest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_NUM_CALLS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def _codecs() -> Mapping[str, Callable[[Tensor, Tensor], Row]]:
    lz4 = importlib.import_module("lz4.frame")
    zstd = importlib.import_module("zstandard")
    compressor, expander = zstd.ZstdCompressor(level=1), zstd.ZstdDecompressor()
    return {
        OURS: _ours,
        "memcpy": _copy,
        "lz4": _of_bytes(lz4.compress, lz4.decompress),
        "zstd -1": _of_bytes(compressor.compress, expander.decompress),
    }


_CODECS = _codecs()
