"""MkDocs hook: pages for files outside docs/, and links to these pages.

The packages' READMEs become pages. A source file that a page links to gets a page that shows the
file. All such links therefore stay within the site.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "packages/cpu-adam/README.md": "packages/cpu-adam.md",
    "packages/zero-comm/README.md": "packages/zero-comm.md",
    "packages/zero-core/README.md": "packages/zero-core.md",
    "packages/zero-offload/README.md": "packages/zero-offload.md",
    "integration/README.md": "packages/zero-engine.md",
    "SECURITY.md": "security.md",
}
ORIGINS = {uri: source for source, uri in PAGES.items()}
LINK = re.compile(r"(?<=\]\()([^()\s#]+)(#[^()\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for files outside docs/."""
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    linked = {}
    for page in list(files.documentation_pages()):
        for found in LINK.finditer(page.content_string):
            path = _path_of(found[1], page.src_uri)
            if path is not None and _is_source(path):
                linked[_uri_of(path)] = path
    for uri, path in sorted(linked.items()):
        files.append(File.generated(config, uri, content=_shown(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links to repository files point to this site's pages. mkdocs handles those in docs/."""
    here = page.file.src_uri

    def redirected(found: re.Match[str]) -> str:
        path = _path_of(found[1], here)
        if path is None or (here not in ORIGINS and path.startswith("docs/")):
            return found[0]
        target = posixpath.relpath(_uri_of(path), posixpath.dirname(here) or ".")
        return target + (found[2] or "")

    return LINK.sub(redirected, markdown)


def _path_of(link: str, uri: str) -> str | None:
    """Return the linked file, relative to the repository's root, or None for a URL."""
    if "://" in link or link.startswith("mailto:"):
        return None
    origin = ORIGINS.get(uri, f"docs/{uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _is_source(path: str) -> bool:
    """Whether a linked file gets a generated page. mkdocs refuses links to missing files."""
    return not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file()


def _uri_of(path: str) -> str:
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    name = path.replace("/.", "/").lstrip(".")  # mkdocs skips names with a leading dot
    return f"source/{name}" if path.endswith(".md") else f"source/{name}.md"


def _shown(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(os.path.splitext(path)[1], "text")
    return f"# {posixpath.basename(path)}\n\n`{path}`\n\n````{language}\n{text}````\n"
