"""Lets the site have the pages and files outside of `docs/` to which its pages link.

In the repository, `docs/hub.md` links to `../examples/Makefile`, and `README.md` to `docs/hub.md`.
On the site, the pages of `docs/` are at the root, so both links change. README.md is the first page
of the site, whose navigation takes the place of `docs/index.md`.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = [
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/README.md",
    "benchmarks/RESULTS.md",
]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of OUTSIDE, and each file of the repository to which a page links."""
    pages = {*OUTSIDE, *(f"docs/{file.src_uri}" for file in files.documentation_pages())}
    linked = {target for page in pages for target in targets(page)}
    for name in sorted({*OUTSIDE, *linked}):
        if not name.startswith("docs/") and (ROOT / name).is_file():
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def targets(page: str) -> list[str]:
    """Returns the files to which a page links. Paths begin at the root of the repository."""
    folder = PurePosixPath(page).parent
    return [normpath(str(folder / link)) for link in LINK.findall((ROOT / page).read_text())]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page for the places that pages and files have on the site."""
    uri = page.file.src_uri
    source = uri if uri in OUTSIDE else f"docs/{uri}"

    def place(link: re.Match[str]) -> str:
        target = normpath(str(PurePosixPath(source).parent / link[0]))
        if target == "docs/index.md":
            target = "README.md"
        return relpath(target.removeprefix("docs/"), str(PurePosixPath(uri).parent))

    return LINK.sub(place, markdown)
