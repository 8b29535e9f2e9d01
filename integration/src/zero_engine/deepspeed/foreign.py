"""Checkpoints that DeepSpeed itself wrote: told, with the way over, not read."""

from __future__ import annotations

from pathlib import Path

from zero_core import CheckpointError

__all__ = ["refuse_foreign"]

_FILES = "*mp_rank_*_states.pt"
"""``mp_rank_00_model_states.pt``, ``zero_pp_rank_0_mp_rank_00_optim_states.pt`` and the like."""


def refuse_foreign(directory: str | Path, tag: object = None) -> None:
    """Raise if ``directory`` holds a checkpoint of DeepSpeed's under ``tag``; None is the newest.

    Raises:
        CheckpointError: it does.
    """
    latest = Path(directory, "latest")
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8").strip()
    place = Path(directory) if tag is None else Path(directory, str(tag))
    found = min((path.name for path in place.glob(_FILES)), default=None)
    if found is not None:
        raise CheckpointError(
            f"{place} was written by DeepSpeed itself (it holds {found}): its pickled optimizer "
            "state is not read here, but the weights can be taken over. With DeepSpeed installed "
            f"and without zero-engine run, call `python {Path(directory, 'zero_to_fp32.py')} "
            f"{directory} WEIGHTS --safe_serialization`, then "
            "zero_core.load_pretrained(engine.core, 'WEIGHTS') on a new engine; a checkpoint of "
            "stage 0 has the whole model as the entry 'module' of its file, for "
            "engine.load_module_state_dict()"
        )
