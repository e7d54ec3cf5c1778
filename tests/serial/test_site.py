"""The site of `make docs`, without building it: it has every page, link and public name."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from types import ModuleType

import pytest
from docs_pages import ROOT


@pytest.fixture(scope="module", autouse=True)
def tools():
    sys.path.insert(0, str(ROOT / "tools"))
    yield
    sys.path.remove(str(ROOT / "tools"))


@pytest.fixture
def site() -> ModuleType:
    return import_module("site_pages")


@pytest.fixture
def reference() -> ModuleType:
    return import_module("reference")


def test_the_navigation_has_every_page_once(site, reference):
    settings = (ROOT / "mkdocs.yml").read_text()
    nav = re.search(r"^nav:\n(.*?)^\S", settings, re.MULTILINE | re.DOTALL)[1]
    listed = re.findall(r"^ +- .*?([\w/-]+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted([*site.pages().values(), *reference.reference_pages()])


def test_every_link_of_a_page_leads_to_the_same_place_on_the_site(site):
    places = site.places()
    assert len(site.pages()) > 20
    for source, page in site.pages().items():
        text = site.with_links_of_the_site(source, (ROOT / source).read_text(), places)
        links = [link for part in site.CODE.split(text)[::2] for link in site.LINK.findall(part)]
        meant = [places[target] for target in site.linked(source)]
        assert links == meant, page  # all pages lie side by side
        assert all((ROOT / target).is_file() for target in site.linked(source)), page


@pytest.mark.parametrize("package", ["zero_mpi", "zero_mpi.nn", "zero_mpi.models", "zero_mpi.comm"])
def test_the_reference_has_every_public_name(package, reference):
    module = import_module(package)
    assert reference.public_names(package) == list(module.__all__)
    first = f"::: {package}.{module.__all__[0]}\n"
    page = next(text for text in reference.reference_pages().values() if first in text)
    for name in module.__all__:
        assert f"::: {package}.{name}\n" in page
