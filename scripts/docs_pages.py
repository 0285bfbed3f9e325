"""Add the pages that lie outside docs/ (notes for contributors, notebooks) to the site, and adapt links to them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
NOTES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
OUTSIDE = re.compile(rf"\]\(\.\./((?:\.\./)*)({'|'.join(map(re.escape, NOTES))}|notebooks/[\w-]+\.ipynb)")
"""Links from docs/ to the repository's root. The site has no folder docs/, so they lose one `../`."""
FIRST_RESULTS = "](docs/results/fedcycle.md)"
"""The page that a link to the folder of results leads to on the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in NOTES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=as_markdown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    if page.file.src_uri in NOTES:
        return markdown.replace("](docs/results/)", FIRST_RESULTS).replace("](docs/", "](")
    linked = OUTSIDE.sub(lambda found: f"]({found[1]}{found[2].replace('.ipynb', '.md')}", markdown)
    return one_title(linked, f"Results of {page.title}") if page.file.src_uri.startswith("results/") else linked


def one_title(markdown: str, title: str) -> str:
    """Add a title to a page of results, and lower its headings, of which every table has one of the first level."""
    return f"# {title}\n\n" + re.sub(r"^#+ ", r"#\g<0>", markdown, flags=re.MULTILINE)


def as_markdown(notebook: Path) -> str:
    """Return a notebook as Markdown: its text, and its code in fences. Notebooks are kept without outputs."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    pieces = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in sources]
    return "\n\n".join([*pieces, f"*This page is `notebooks/{notebook.name}`; run it to see what it prints.*"]) + "\n"
