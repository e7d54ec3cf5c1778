"""Functions that mkdocs calls to build the site from pages in several folders of the project (mkdocs.yml).

README is the first page, and other pages at the root of the project are on the site too. Links between pages
are written for the repository, and are changed here to lead to the same place on the site. A file of the
project to which a page links is copied to the site. Only `File.generated` of mkdocs is used, so that tests
run without mkdocs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from reference import reference_pages

ROOT = Path(__file__).resolve().parents[1]
# Pages whose path on the site differs from docs/: pages at the project's root, and docs/index.md.
MOVED = {
    "README.md": "index.md",
    "docs/index.md": "pages.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
ASSETS = ROOT / "tools" / "site_assets"
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"<code>(?=[^<]{1,26}</code>)")  # short enough for a line on a phone
FILE = re.compile(r"(?<=\[)[\w./-]+\.md(?=\]\(([^)#\s]+))")  # a link whose text is the name of a file
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[#)])")


def pages() -> dict[str, str]:
    """Return path in the project -> path on the site, for all pages that people write."""
    own = {f"docs/{path.name}": path.name for path in sorted((ROOT / "docs").glob("*.md"))}
    return own | MOVED


def places() -> dict[str, str]:
    """Return path in the project -> path on the site, for pages, pictures, and files that a page links to."""
    found = pages()
    found |= {f"docs/images/{path.name}": f"images/{path.name}" for path in (ROOT / "docs/images").iterdir()}
    for page in pages():
        for link in linked(page):
            found.setdefault(link, f"files/{link}")
    return found


def linked(page: str) -> list[str]:
    """Return the paths in the project to which a page has links."""
    parts = CODE.split((ROOT / page).read_text(encoding="utf-8"))
    return [target(page, link) for part in parts[::2] for link in LINK.findall(part)]


def target(page: str, link: str) -> str:
    """Return the path in the project that a page's link points to."""
    return os.path.normpath(Path(page).parent / link)


def title(page: str) -> str:
    """Return the heading of a page."""
    return (ROOT / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def with_links_of_the_site(page: str, text: str, places: dict[str, str]) -> str:
    """Return the text of a page with links for the site. Titles replace file names as link texts."""
    here = Path(places[page]).parent

    def called(name: re.Match[str]) -> str:
        return title(target(page, name[1]))

    def moved(link: re.Match[str]) -> str:
        return os.path.relpath(places[target(page, link[1])], here)

    parts = CODE.split(text)
    parts[::2] = [LINK.sub(moved, FILE.sub(called, part)) for part in parts[::2]]
    return "".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files of the site that are not in docs/. mkdocs calls this."""
    from mkdocs.structure.files import File  # not installed where only tests use this module

    def add(path: str, **how: Any) -> None:
        if old := files.get_file_from_path(path):
            files.remove(old)
        files.append(File.generated(config, path, **how))

    for source, path in places().items():
        if not source.startswith("docs/") or source in MOVED:
            add(path, abs_src_path=str(ROOT / source))
    for asset in ASSETS.iterdir():
        add(f"assets/{asset.name}", abs_src_path=str(asset))
    for path, text in reference_pages().items():
        add(path, content=text)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page, which mkdocs converts to HTML next. mkdocs calls this.

    A page without headings of level 2 gets no table of contents, so its tables can be wider.
    """
    if "\n## " not in markdown and not page.file.src_uri.startswith("reference/"):
        page.meta["hide"] = ["toc"]
    sources = {path: source for source, path in pages().items()}
    source = sources.get(page.file.src_uri)
    return with_links_of_the_site(source, markdown, places()) if source else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Return HTML without backslashes before bars in tables, with short names marked. mkdocs calls this."""
    html = re.sub(r"<(t[dh])[ >].*?</\1>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)
    return NAME.sub('<code class="name">', html)


def on_post_build(config: Any) -> None:
    """Remove files that need the address of the site, which is not known. mkdocs calls this at the end."""
    for name in ("404.html", "sitemap.xml", "sitemap.xml.gz"):
        (Path(config.site_dir) / name).unlink(missing_ok=True)
