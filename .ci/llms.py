"""The file ``llms.txt`` for assistants (llmstxt.org): ``python .ci/llms.py [--write]``.

It links the skill and the pages of the site's navigation, except API pages and single decisions,
with headings or a summary. Without ``--write``, the exit code is 1 if the file is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "llms.txt"
SKILL = "skills/zero-parts/SKILL.md"
OUTSIDE = {"packages/zero-engine.md": "integration/README.md", "security.md": "SECURITY.md"}
ENTRY = re.compile(r"( +)- \"?(.+?)\"?:(?: (\S+\.md))?\n")


def make() -> str:
    start = (ROOT / "docs/index.md").read_text(encoding="utf-8").replace("](", "](docs/")
    title, summary, _, install, command, *_ = start.split("\n\n")
    head = [title, f"> {' '.join(summary.split())}", install, command]
    return "\n\n".join([*head, *("\n".join(lines) for lines in sections())]) + "\n"


def sections() -> Iterator[list[str]]:
    """Yield the lines of each section. Readers may skip "Optional", the site's section "Design"."""
    skill = (ROOT / SKILL).read_text(encoding="utf-8")
    found = re.search("^description: (.+)$", skill, re.M)
    assert found is not None, f"{SKILL} has no description"
    yield ["## Skill", "", f"- [Moving a script, choosing, errors]({SKILL}): {found[1]}"]
    lines = ["## Start", ""]
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    for indent, title, page in ENTRY.findall(nav):
        is_section = len(indent) == 2 and not page
        if is_section or title == "Performance":
            yield lines
            lines = [f"## {'Optional' if title == 'Design' else title}", ""]
        # Leave out API pages, made from the sources, and decisions, which their index links.
        if page and not re.match("api/|decisions/(?!README)", page):
            lines.append(link("Decisions" if title == "Index" else title, page))
    yield lines


def link(title: str, page: str) -> str:
    path = OUTSIDE.get(page) or re.sub(r"^packages/(.+)\.md$", r"packages/\1/README.md", page)
    path = path if (ROOT / path).is_file() else f"docs/{page}"
    text = re.sub(r"^```.*?^```", "", (ROOT / path).read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^##+ (.+)$", text, re.M)
    first = text.split("\n\n")[1].split(". ")[0]
    return f"- [{title}]({path}): {'; '.join(headings) or ' '.join(first.split())}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(make(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != make():
        sys.exit("llms.txt is not what the documentation makes: run python .ci/llms.py --write")
