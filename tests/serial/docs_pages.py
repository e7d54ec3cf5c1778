"""Parser of the commands in the documentation: shell lines and Python programs in the order of the page."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w+\.py)\n")
PROGRAM = re.compile(r"^ {4}((?:mpirun|mpiexec|python|zero-mpi|make) .*)$", re.MULTILINE)
OF_HOSTFILE = re.compile(
    r"^#   (mpi\w+ .*?)(?: {2,}\(.*\))?$|^# The other form: (zero-mpi .*)$", re.MULTILINE
)


@dataclass(frozen=True)
class Line:
    """Shell line of a page; lines that a backslash joins are one, and the comment after ` #` is removed."""

    text: str


@dataclass(frozen=True)
class Program:
    """Python program of a page, with the file name that the page gives, if any."""

    name: str
    text: str


def shell_lines(text: str) -> list[Line]:
    joined = re.sub(r"\\\n\s*", "", text)
    bare = (re.sub(r"(^|\s+)#\s.*", "", line).strip() for line in joined.splitlines())
    return [Line(line) for line in bare if line]


def steps_of(page: Path) -> list[Line | Program]:
    steps: list[Line | Program] = []
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "sh":
            steps += shell_lines(text)
        else:
            match = NAMED.match(text)
            steps.append(Program(match[1] if match else "", text))
    return steps


def lines_elsewhere() -> dict[Path, list[str]]:
    lines = {}
    for path in sorted((ROOT / "examples").glob("*.py")):
        lines[path] = PROGRAM.findall(ast.get_docstring(ast.parse(path.read_text()), clean=False) or "")
    for path in sorted((ROOT / "hostfiles").iterdir()):
        lines[path] = [line or other for line, other in OF_HOSTFILE.findall(path.read_text())]
    return lines
