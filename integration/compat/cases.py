"""A row of the pack: a public script or configuration, and how it is run here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A program with its arguments.

    In ``arguments`` and ``launcher``, ``{model}`` is a folder of tiny models, ``{data}`` one of
    data, ``{output}`` a new folder, and ``{config}`` the file that ``config`` is written to.

    Attributes:
        family: whose script or configuration it is.
        name: unique in its family.
        program: a file in ``scripts/``, or an installed module.
        config: DeepSpeed's configuration; None where the program has its own.
        launcher: a launcher of the program's own that takes the place of the ranks' launcher, and
            its arguments.
        files: further files by name, written beside the configuration; ``{config}`` is replaced.
        ddp: where DeepSpeed itself does not run on the CPU, the arguments for the same training
            with DDP.
        tolerance: of a loss against the other side's, relative.
        compared: what of a Trainer's log is compared, where its loss is always 0.
        needs: modules that not every installation has.
    """

    family: str
    name: str
    program: str
    arguments: tuple[str, ...] = ()
    config: Config | None = None
    launcher: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    ddp: tuple[str, ...] = ()
    tolerance: float = 1e-3
    compared: str = "loss"
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name among all cases."""
        return f"{self.family}: {self.name}"

    @property
    def reference(self) -> str:
        """The side that its losses are compared with."""
        return "ddp" if self.ddp else "deepspeed"
