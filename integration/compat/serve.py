"""A rank that has imported the libraries, and from which the ranks of programs are forked.

A launcher starts it (``zero-engine run`` or torchrun), with all of a rank's variables. It writes
these, and the program by which processes are forked, to ``COMPAT_SERVERS/RANK.json``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from pathlib import Path

from benchmarks.harness.forked_python import listen, serve
from benchmarks.harness.ranks import write_json

PRELOADED = (
    "deepspeed",
    "torch._dynamo",
    "lightning.pytorch",
    "peft",
    "safetensors.torch",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.roberta.modeling_roberta",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
    "transformers.trainer_seq2seq",
    "measured",
)


def main() -> None:
    """Import, and serve until the other side has closed."""
    for module in PRELOADED:
        importlib.import_module(module)
    if importlib.util.find_spec("trl"):
        importlib.import_module("trl.trainer.sft_trainer")
    listener, program = listen(tempfile.mkdtemp())
    place = Path(os.environ["COMPAT_SERVERS"], f"{os.environ['RANK']}.json")
    write_json(place, {"program": program, "variables": dict(os.environ)})
    serve(listener)


if __name__ == "__main__":
    main()
