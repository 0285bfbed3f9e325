"""Pages of the documentation that lie elsewhere in the repository: notes for contributors, and the notebooks."""

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
"""Links that are right in the repository, and on the site one folder nearer."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in NOTES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=as_markdown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    linked = OUTSIDE.sub(lambda found: f"]({found[1]}{found[2].replace('.ipynb', '.md')}", markdown)
    return one_title(linked, f"Results of {page.title}") if page.file.src_uri.startswith("results/") else linked


def one_title(markdown: str, title: str) -> str:
    """Pages of results have a first-level heading for every table: a table of contents wants them one lower."""
    return f"# {title}\n\n" + re.sub(r"^#+ ", r"#\g<0>", markdown, flags=re.MULTILINE)


def as_markdown(notebook: Path) -> str:
    """Text as it is, code in fences; outputs are not kept, whoever runs it sees them."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    told = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    pieces = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in told]
    return "\n\n".join([*pieces, f"*This page is `notebooks/{notebook.name}`; run it to see what it prints.*"]) + "\n"
