"""The code blocks of the READMEs, the skill and docs/."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[3]
SKILL = ROOT / "skills" / "zero-parts" / "SKILL.md"
PAGES = (
    ROOT / "README.md",
    SKILL,
    ROOT / "integration" / "README.md",
    *sorted((ROOT / "packages").glob("*/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
)
MODULES = {"torchrun": "torch.distributed.run", "zero-engine": "zero_engine"}
"""Modules of the programs that pages call."""
FURTHER = ("bitsandbytes", "torchao")
"""Libraries that some Python blocks need and that only `nox -s compat` installs."""


class Block(NamedTuple):
    """A code block. Indented ones are bash. Python without imports includes the code before it."""

    name: str
    page: Path
    language: str
    text: str

    @property
    def needs_further(self) -> bool:
        return any(name in self.text.lower() for name in FURTHER)


def find_blocks(*languages: str) -> Iterator[Block]:
    for page in PAGES:
        tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
        found = [token for token in tokens if token.type in ("fence", "code_block")]
        before = ""
        for number, token in enumerate(found):
            language, text = "bash", token.content
            if token.type == "fence":
                language = token.info.partition(" ")[0]
            if language == "python":
                before = text = text if "import " in text else before + text
            if not languages or language in languages:
                yield Block(f"{page.parent.name}-{page.stem}-{number}", page, language, text)


def documented_arguments(command: str) -> list[str]:
    """Return the interpreter's arguments for a documented command, usable in any folder."""
    program, *words = shlex.split(command)
    module = [] if program == "python" else ["-m", MODULES[program]]
    return [*module, *(str(ROOT / word) if (ROOT / word).is_file() else word for word in words)]


def run_example(block: Block, folder: Path) -> None:
    os.chdir(folder)
    exec(compile(block.text, block.name, "exec"), {"__name__": "__main__"})
