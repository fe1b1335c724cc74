"""Makes README the site's home, and a part of the site what pages link to outside of docs/.

A link of docs/ that leads out of it, ](../results/hours/claims.md), is right in a checkout. The
site has that file at results/hours/claims.md, beside the pages.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
HOME = "index.md"
PAGES = (HOME, "CHANGELOG.md", "CONTRIBUTING.md")
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
OF_README = re.compile(r"\]\((?!docs/|https?:)([^)#]+)")


def on_files(files: Files, *, config: Any) -> None:
    """Adds the files: all of results/, and each that a page of docs/ links to."""
    texts = [file.content_string for file in files.documentation_pages()]
    readme = ROOT / "README.md"
    files.append(File.generated(config, HOME, abs_src_path=str(readme)))
    linked = {found for text in texts for found in OUTSIDE.findall(text)}
    linked |= set(OF_README.findall(readme.read_text(encoding="utf-8")))
    results = (path for path in (ROOT / "results").rglob("*") if path.is_file())
    for path in {*results, *(ROOT / name for name in (*PAGES[1:], *linked))}:
        if path.is_file() and not _is_replaced(path):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Writes links as they lead from the page's place in the site."""
    if page.file.src_uri in PAGES:
        return re.sub(r"(\]\(|src=\"|srcset=\")docs/", r"\1", markdown)
    if page.file.src_uri.startswith("results/"):
        page.meta["search"] = {"exclude": True}  # tables of numbers would fill every answer
        return markdown.replace("../docs/", "../")
    return OUTSIDE.sub(_inside, markdown)


def _inside(link: re.Match[str]) -> str:
    """Removes a link's way out of docs/; a folder's link becomes that of its README."""
    target = link[1]
    return f"]({target}README.md" if target.endswith("/") else f"]({target}"


def _is_replaced(path: Path) -> bool:
    """Tells whether a README would be written over the index.html of its folder."""
    return path.name == "README.md" and (path.parent / "index.html").exists()
