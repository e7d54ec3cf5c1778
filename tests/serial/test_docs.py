"""The commands in the documentation run, and its pictures match the code."""

import ast
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from docs_commands import ROWS, SMALL, ByTest, Make, Run, Suite, how_of, row_of
from docs_pages import PAGES, ROOT, Line, Program, lines_elsewhere, steps_of
from jobs import run_command, run_job, with_warm_python
from test_command_bits import needs_mpiexec

TEXT = "".join(f"def f{n}(x):\n    return x + {n}\n\n\n" for n in range(400))
WALKED = [page for page in PAGES if any(isinstance(step, Line) for step in steps_of(page))]
FOLDERS = ("examples", "hostfiles", "benchmarks", "tools")  # folders that commands name
TOLD = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]  # includes pages without commands


def all_lines() -> list[str]:
    of_pages = [step.text for page in PAGES for step in steps_of(page) if isinstance(step, Line)]
    return of_pages + [line for lines in lines_elsewhere().values() for line in lines]


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_rows_are_of_commands_tests_and_parts_of_the_suite_that_exist():
    lines, script = all_lines(), (ROOT / ".ci" / "run").read_text()
    assert sorted(ROWS.keys() - set(map(row_of, lines))) == [], "no page has these commands"
    for row in ROWS.values():
        if isinstance(row, ByTest):
            path, _, test = row.test.partition("::")
            assert test in functions(ROOT / path), row.test
        assert not isinstance(row, Suite) or re.search(rf"^ *{row.in_ci}", script, re.M), row


@pytest.mark.parametrize("target", [line for line in all_lines() if line.startswith("make ")])
def test_a_target_does_what_the_table_says(target):
    """Check the commands that `make -n` prints for a target."""
    command = ["bash", "-c", target.replace("make", "make -n", 1)]
    plain = dict.fromkeys(("MAKEFLAGS", "MFLAGS", "ARGS"), "")  # an outer `make test ARGS=...` may set these
    status, printed, errors = run_command(command, timeout=20, cwd=ROOT, env=plain)
    assert (status, errors) == (0, "")
    prints = getattr(how_of(target), "prints", "")
    assert not prints or prints in [line.strip() for line in printed.splitlines()]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.py").write_text(TEXT)
    flags = [*SMALL.split(), "--context", "128", "--steps", "1", "--sample", "0", "--eval-every", "0"]
    command = ["-m", "zero_mpi.train", *flags, "--data", "text.py", "--val-fraction", "0", "--out", "run"]
    status, printed, errors = run_job(1, command, cwd=folder)
    assert (status, errors) == (0, ""), printed + errors
    return folder / "run" / "latest" / "model.gguf"


def furnish(folder: Path, model: Path) -> None:
    for name in FOLDERS:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "my-texts").mkdir()
    for name in "abc":
        (folder / "my-texts" / f"{name}.py").write_text(f"# {name}\n{TEXT}")
    (folder / "MODEL.gguf").symlink_to(model)
    (folder / "run.toml").write_text("steps = 5\nlog-every = 1\n")


def do(line: str, folder: Path) -> None:
    row = how_of(line)
    if not isinstance(row, Run | Make):
        return
    command, add = (row.prints if isinstance(row, Make) else line), row.add
    head, redirect, target = re.sub(r"(?<=-n )[48]\b", "2", command).partition(" > ")
    status, printed, errors = run_command(
        ["bash", "-c", f"{head} {add}{redirect}{target}"],
        timeout=100,
        cwd=folder,
        env={"PATH": with_warm_python(folder.parent / "programs")},
    )
    message = f"{line}\n(with {add or 'nothing'} added) ended with {status} and said\n{printed}\n{errors}"
    assert status in getattr(row, "statuses", (0,)), message
    assert re.search(row.says, printed), f"expected {row.says!r}: {message}"


@needs_mpiexec
@pytest.mark.timeout_seconds(200)
@pytest.mark.parametrize("page", WALKED, ids=lambda page: page.stem)
def test_a_page_works_from_top_to_bottom(page, model, tmp_path):
    furnish(tmp_path, model)
    for step in steps_of(page):
        if isinstance(step, Line):
            do(step.text, tmp_path)
        elif step.name:
            (tmp_path / step.name).write_text(step.text)


@needs_mpiexec
def test_commands_of_hostfiles_work(tmp_path, model):
    furnish(tmp_path, model)
    lines = [line for lines in lines_elsewhere().values() for line in lines]
    runnable = [line for line in lines if isinstance(how_of(line), Run)]
    assert len(runnable) >= 2
    for line in runnable:
        do(line, tmp_path)


def test_programs_of_pages_have_names():
    for page in PAGES:
        steps = steps_of(page)
        lines = " ".join(step.text for step in steps if isinstance(step, Line))
        texts = " ".join(step.text for step in steps if isinstance(step, Program))
        for step in steps:
            if isinstance(step, Program) and page.name != "README.md":
                assert step.name, f"{page.name}: {step.text[:60]!r} has no name in its first line"
                module = step.name.removesuffix(".py")
                assert step.name in lines or f"from {module} import" in texts, f"nothing runs {step.name}"


@pytest.fixture(scope="session")
def tools() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "tools"))
    yield
    sys.path.remove(str(ROOT / "tools"))


def test_pictures_are_those_of_the_code_told_in_words_and_used(tools):
    """`python tools/figures.py` draws the pictures again."""
    new = {name: draw() for name, draw in import_module("figures").pictures().items()}
    folder = ROOT / "docs" / "images"
    pages = "".join(page.read_text() for page in TOLD)
    assert {path.name for path in folder.iterdir()} == new.keys()
    for name, picture in new.items():
        assert (folder / name).read_text() == picture, f"{name} is out of date: python tools/figures.py"
        root = ElementTree.fromstring(picture)
        texts = [root.find(f"{{http://www.w3.org/2000/svg}}{part}").text for part in ("title", "desc")]
        assert all(len(text) > 20 for text in texts), name
        assert f"images/{name})" in pages, f"no page shows {name}"
