"""The code blocks of the READMEs and of docs/, as they are printed there."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "integration" / "README.md",
    *sorted((ROOT / "packages").glob("*/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
)
MODULES = {"torchrun": "torch.distributed.run", "zero-engine": "zero_engine"}
"""Programs of the pages, as the modules that they run."""
FURTHER = ("bitsandbytes", "torchao")
"""Libraries without which a block of Python cannot run, and which only `nox -s compat` installs."""
_FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.M | re.S)
_ITEM = re.compile(r"[-*] |\d+\. ")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        name: page and number.
        page: the file that it is in.
        language: the word after the fence; "bash" for a block that is indented.
        text: its lines.
    """

    name: str
    page: Path
    language: str
    text: str

    @property
    def needs_further(self) -> bool:
        """Whether it uses one of `FURTHER`; BitsAndBytesConfig stands for the first."""
        return any(name in self.text.lower() for name in FURTHER)


def find_blocks(*languages: str) -> Iterator[Block]:
    """Yield the blocks of all pages that are in ``languages``; without any, all blocks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = [(m[1], m[2]) for m in _FENCED.finditer(text)]
        found += [("bash", block) for block in _indented(_FENCED.sub("", text))]
        for number, (language, block) in enumerate(found):
            if not languages or language in languages:
                name = f"{page.parent.name}-{page.stem}-{number}"
                yield Block(name, page, language, textwrap.dedent(block))


def documented_arguments(command: str) -> list[str]:
    """Return an interpreter's arguments for a line of a page, to be run in any folder."""
    program, *words = shlex.split(command)
    module = [] if program == "python" else ["-m", MODULES[program]]
    return [*module, *(str(ROOT / word) if (ROOT / word).is_file() else word for word in words)]


def _indented(text: str) -> Iterator[str]:
    """Yield blocks that are indented by four blanks, apart from what belongs to a list."""
    block: list[str] = []
    is_list, was_blank = False, True
    for line in [*text.splitlines(), "end"]:
        is_code = line.startswith("    ") and not is_list and (was_blank or bool(block))
        if is_code or (block and not line):
            block.append(line)
        elif block:
            yield "\n".join(block)
            block = []
        if line and not line.startswith(" "):
            is_list = bool(_ITEM.match(line))
        was_blank = not line
