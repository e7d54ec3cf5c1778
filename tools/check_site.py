#!/usr/bin/env python3
"""Check every link inside the site that `make docs` built, and look for requests to other hosts.

    python tools/check_site.py [FOLDER]

Prints faults and counts. Exits with status 1 if there is a fault. A link may lead to any host, but the folder
must have all scripts, styles, pictures and fonts that its pages load, and the API reference all public names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from reference import PAGES, public_names

SITE = Path(__file__).resolve().parents[1] / "site"
LOADED = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)")


class Page(HTMLParser):
    """Parser that collects the links, the loaded files and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors = {""}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the links, files and anchors of an element. HTMLParser calls this."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given.get("id", ""), given.get("name", "")}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.loads.add(given["href"])
        elif "src" in given:
            self.loads.add(given["src"])


@cache
def read(path: Path) -> Page:
    """Return the links, loads and anchors of the page in a file."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def is_outside(link: str) -> bool:
    """Return whether a link leads out of the site: it begins with a scheme or a host."""
    return re.match(r"(\w+:)?//|\w+:", link) is not None


def faults_of(path: Path) -> Iterator[str]:
    """Yield the faults in the links and loads of a page."""
    page = read(path)
    yield from (f"loads {load}" for load in page.loads if is_outside(load) and not load.startswith("data:"))
    for link in (page.links | page.loads) - {""}:
        place, _, anchor = unquote(link).partition("#")
        target = path.parent / place if place else path
        if is_outside(link):
            continue
        if not target.exists():
            yield f"leads to {link}, which does not exist"
        elif target.suffix == ".html" and anchor not in read(target.resolve()).anchors:
            yield f"leads to {link}, where no element has this id"


def faults(site: Path) -> Iterator[str]:
    """Yield the faults of all pages and style sheets, and public names that the API reference lacks."""
    for path in sorted(site.rglob("*.html")):
        yield from (f"{path.relative_to(site)} {fault}" for fault in faults_of(path.resolve()))
    for path in sorted(site.rglob("*.css")):
        yield from (
            f"{path.relative_to(site)} loads {url}" for url in LOADED.findall(path.read_text("utf-8"))
        )
    for name, (_, package) in PAGES.items():
        anchors = read((site / name).with_suffix(".html").resolve()).anchors
        missing = [each for each in public_names(package) if f"{package}.{each}" not in anchors]
        yield from (f"{name} has no {each}" for each in missing)


def main() -> int:
    """Print the faults and the counts. Return the exit status."""
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE
    found = list(faults(site))
    for fault in found:
        print(fault)
    count = len(list(site.rglob("*.html")))
    print(f"{count} pages, {len(found)} faults")
    return 1 if found or not count else 0


if __name__ == "__main__":
    sys.exit(main())
