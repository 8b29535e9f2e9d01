"""Conversion of a text to batches of token ids.

The last part of the text is **held out**, and training uses the rest. Both are cut into **windows**
of ``context`` tokens. Rank 0 writes both parts to a file in the run's folder. All ranks map that
file, also in a resumed run, which therefore does not need the original text.

`Corpus.batch` has no state other than the file and the seed: resuming needs only the step.
"""

from __future__ import annotations

import hashlib
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from zero_core.errors import ConfigError, ZeroError
from zero_core.footprint import format_bytes

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_FRACTION = 0.05
# Limits on the text keep start-up within seconds.
MAX_STDLIB_CHARS = 6_000_000
MAX_BPE_CHARS = 2_000_000
# Folders in the standard library's tree that are not read.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def read_text(path: str | None) -> str:
    if path is None:
        return _read_stdlib()
    file = Path(path)
    if not file.is_file():
        found = "a folder" if file.is_dir() else "nothing"
        raise ConfigError(f"--data {file}: expected a text file, found {found} there")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--data {file}: not UTF-8 text (byte {error.start}: {error.reason}); "
            "convert it first, e.g. with iconv -t UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"--data {file}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise ConfigError(f"--data {file}: the file is empty; give one with text in it")
    return text


def check_length(text: str, context: int, num_tokens: int | None = None) -> None:
    """Raise ConfigError if ``text`` has too few tokens. A token has at least one byte."""
    found = len(text.encode()) if num_tokens is None else num_tokens
    if found < 2 * context:
        raise ConfigError(
            f"--data: the text has {'at most ' * (num_tokens is None)}{found} tokens: too short "
            f"for one window of {context} to train on and one to hold out; give more text or a "
            "smaller --context"
        )


def _read_stdlib() -> str:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]
    # Sort by a hash of the name, so that the held-out end is a mixture of modules.
    files.sort(key=lambda path: _digest(path.relative_to(root).as_posix()))
    texts: list[str] = []
    num_chars = 0
    for path in files:
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        num_chars += len(texts[-1])
        if num_chars >= MAX_STDLIB_CHARS:
            break
    if not texts:
        raise ConfigError(f"no Python source found under {root}; name a text file with --data")
    return "\n".join(texts)[:MAX_STDLIB_CHARS]


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(text[:MAX_BPE_CHARS]), trainer)
    return tokenizer


def prepare_corpus(text: str, folder: Path, *, vocab_size: int, context: int) -> None:
    tokenizer = train_tokenizer(text, vocab_size)
    encoded, pieces = [], _pieces(text)
    while batch := list(islice(pieces, 256)):  # the encoder runs a batch in parallel
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        encoded += [torch.tensor(encoding.ids, dtype=torch.int32) for encoding in encodings]
    tokens = torch.cat(encoded)
    num_windows = tokens.numel() // context
    check_length(text, context, tokens.numel())
    windows = tokens[: num_windows * context].view(num_windows, context)
    num_held_out = max(1, int(num_windows * HELD_OUT_FRACTION))
    parts = {"train": windows[:-num_held_out], "held_out": windows[-num_held_out:]}
    about = {"sha256_of_text": _digest(text), "vocab_size": str(tokenizer.get_vocab_size())}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        save_file(parts, folder / "tokens.safetensors", metadata=about)
    except Exception as error:  # tokenizers and safetensors do not raise OSError for a full disk
        free = shutil.disk_usage(folder.parent).free
        raise ZeroError(
            f"{folder}: the encoded text cannot be written: {error}. It takes "
            f"{format_bytes(windows.nbytes)}, and {format_bytes(free)} are free there: make room, "
            "or choose another --output"
        ) from None


@dataclass(frozen=True)
class Corpus:
    """Windows of one run: int32, ``[num_windows, context]``, on the CPU."""

    train: Tensor
    held_out: Tensor
    vocab_size: int
    sha256_of_text: str
    seed: int

    @classmethod
    def open(cls, folder: Path, *, seed: int) -> Corpus:
        with safe_open(folder / "tokens.safetensors", framework="pt") as file:
            about = file.metadata()
            return cls(
                train=file.get_tensor("train"),
                held_out=file.get_tensor("held_out"),
                vocab_size=int(about["vocab_size"]),
                sha256_of_text=about["sha256_of_text"],
                seed=seed,
            )

    def batch(
        self, micro_step: int, *, rank: int, world_size: int, micro_batch_size: int
    ) -> Tensor:
        """Return the token ids of one micro-batch: int64, ``[micro_batch_size, context]``.

        ``micro_step`` counts micro-batches from the start of the run. Each epoch visits every
        window once, in a new order.
        """
        first = (micro_step * world_size + rank) * micro_batch_size
        rows = []
        for index in range(first, first + micro_batch_size):
            epoch, place = divmod(index, len(self.train))
            rows.append(int(_permutation(len(self.train), self.seed, epoch)[place]))
        return self.train[rows].long()

    def held_out_batches(
        self, max_windows: int, *, rank: int, world_size: int, micro_batch_size: int
    ) -> Iterator[Tensor]:
        """Yield this rank's part of the first ``max_windows`` held-out windows, as int64 batches.

        Every rank gets the same number of batches, since each forward is a collective. If the
        windows do not divide evenly, some windows are used more than once.
        """
        num_windows = min(max_windows, len(self.held_out))
        num_batches = -(-num_windows // (world_size * micro_batch_size))
        for batch in range(num_batches):
            first = (batch * world_size + rank) * micro_batch_size
            rows = [index % num_windows for index in range(first, first + micro_batch_size)]
            yield self.held_out[rows].long()


@lru_cache(maxsize=1)
def _permutation(length: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(length, generator=generator)


def _pieces(text: str) -> Iterator[str]:
    """Yield ``text`` in pieces of whole lines, all but the last of at least 20,000 characters."""
    piece: list[str] = []
    num_chars = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        num_chars += len(line)
        if num_chars >= 20_000:
            yield "".join(piece)
            piece, num_chars = [], 0
    if piece:
        yield "".join(piece)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()
