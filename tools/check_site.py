#!/usr/bin/env python3
"""Follow every link of the site that `make docs` built, and look for requests to other hosts.

    python tools/check_site.py [FOLDER]

Prints what is wrong, a line each, and counts; exits with status 1 if something is. A link that a reader may
click leads where it likes; what a page loads by itself (scripts, styles, pictures, fonts) lies in the folder.
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
    """The links, loads and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors = {""}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by HTMLParser for each element."""
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
    """A page that was read whole."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def is_outside(link: str) -> bool:
    """Whether a link leads to a host."""
    return re.match(r"(\w+:)?//|\w+:", link) is not None


def faults_of(path: Path) -> Iterator[str]:
    """What is wrong with the links and loads of a page."""
    page = read(path)
    yield from (f"loads {load}" for load in page.loads if is_outside(load) and not load.startswith("data:"))
    for link in (page.links | page.loads) - {""}:
        place, _, anchor = unquote(link).partition("#")
        target = path.parent / place if place else path
        if is_outside(link):
            continue
        if not target.exists():
            yield f"leads to {link}, which is not there"
        elif target.suffix == ".html" and anchor not in read(target.resolve()).anchors:
            yield f"leads to {link}, where nothing has this name"


def faults(site: Path) -> Iterator[str]:
    """Everything that is wrong."""
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
    """Print what is wrong and how much was looked at; returns the exit status."""
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE
    found = list(faults(site))
    for fault in found:
        print(fault)
    count = len(list(site.rglob("*.html")))
    print(f"{count} pages, {len(found)} faults")
    return 1 if found or not count else 0


if __name__ == "__main__":
    sys.exit(main())
