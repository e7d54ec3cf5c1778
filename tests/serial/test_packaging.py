"""The files of `packaging/` have the version and the dependencies of pyproject.toml."""

import re
import tomllib

import pytest
from docs_pages import ROOT

import zero_mpi

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FLOORS = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", line).groups() for line in PROJECT["dependencies"])
PYTHON = PROJECT["requires-python"].removeprefix(">=")
PACKAGING = ROOT / "packaging"
SPACK = PACKAGING / "spack/spack_repo/zero_mpi/packages/py_zero_mpi/package.py"
# Names that differ at conda-forge and EasyBuild, and packages that EasyBuild has in bundles.
CONDA = {"ml-dtypes": "ml_dtypes", "xxhash": "python-xxhash"}
EASYBUILD = {"ml-dtypes": "ml_dtypes", "xxhash": "python-xxhash", "numpy": "SciPy-bundle"}
BUNDLED = dict.fromkeys(("jinja2", "threadpoolctl", "tomli-w"), "Python-bundle-PyPI")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_every_file_is_for_this_version():
    texts = {path: path.read_text() for path in PACKAGING.rglob("*") if path.is_file()}
    assert len(texts) >= 9
    for path, text in texts.items():
        named = set(re.findall(r"zero[_-]mpi[-/]v?(\d+\.\d+\.\d+)", f"{path.name} {text}"))
        named |= set(re.findall(r"^\s*(?:set |local )?version\W+(\d[\d.]*\d)", text, re.MULTILINE))
        assert named <= {zero_mpi.__version__}, path
        if path.suffix not in (".py", ".yaml") or path in (SPACK, PACKAGING / "conda/recipe.yaml"):
            assert named, f"{path} names no version"


def test_the_newest_release_is_dated_alike():
    log = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.findall(r"^## ([\d.]+) - ([\d-]+)$", log, re.MULTILINE)[0]
    assert version == zero_mpi.__version__
    assert log.index("\n## Unreleased\n") < log.index(f"\n## {version} - ")
    assert f"\nversion: {version}\ndate-released: {date}\n" in (ROOT / "CITATION.cff").read_text()


def test_dependencies_of_spack():
    depends = r'depends_on\("py-([\w-]+)@([\d.]+):", type=\("build", "run"\)\)'
    floors = dict(re.findall(depends, SPACK.read_text()))
    assert floors == FLOORS
    assert f'depends_on("python@{PYTHON}:"' in SPACK.read_text()
    extras = PROJECT["optional-dependencies"]
    for name, floor, variant in re.findall(r'"py-(\w+)@([\d.]+):".*when="\+(\w+)"', SPACK.read_text()):
        assert extras[variant] == [f"{name}>={floor}"]


def test_dependencies_of_conda():
    text = (PACKAGING / "conda/recipe.yaml").read_text()
    assert f"- zero-mpi = {PROJECT['scripts']['zero-mpi']}\n" in text
    run = text.partition("  run:\n")[2].partition("\n\n")[0]
    floors = dict(re.findall(r"- ([\w-]+) >=([\d.]+)", run))
    assert floors == {CONDA.get(name, name): floor for name, floor in FLOORS.items()} | {"python": PYTHON}


def test_dependencies_of_easybuild():
    text = next((PACKAGING / "easybuild").glob("*.eb")).read_text()
    versions = dict(re.findall(r"\('([\w-]+)', '([\d.]+)'", text))
    for name, floor in FLOORS.items():
        if name in BUNDLED:
            assert BUNDLED[name] in versions
        elif name == "numpy":
            assert versions[EASYBUILD[name]] >= "2025"  # the first bundles with NumPy 2
        else:
            assert numbers(versions[EASYBUILD.get(name, name)]) >= numbers(floor), name
    assert numbers(versions["Python"]) >= numbers(PYTHON)


@pytest.mark.parametrize("name", ["tcl/zero-mpi", "lua/zero-mpi"])
def test_a_module_is_named_by_its_version(name):
    versions = [path.name.removesuffix(".lua") for path in (PACKAGING / "modulefiles" / name).iterdir()]
    assert versions == [zero_mpi.__version__]
