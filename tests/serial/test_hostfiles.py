"""Launchers read the hostfiles of the project, and `hostfile` converts both forms."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import launcher, launcher_kind, run_command

from zero_mpi.commands.hostfile import LINES, HostEntry, read_hosts
from zero_mpi.errors import UsageError

FOLDER = Path(__file__).resolve().parents[2] / "hostfiles"
TWICE_TWO = [HostEntry("node1", 2), HostEntry("node2", 2)]


def installed_launcher() -> str:
    try:
        return launcher()[0]
    except FileNotFoundError as error:
        pytest.skip(str(error))


def hosts_of(text: str) -> list[HostEntry]:
    return read_hosts(text.splitlines(), "FILE")


def convert(*arguments: str | Path, text: str | None = None, folder: Path | None = None) -> Any:
    job = [sys.executable, "-m", "zero_mpi", "hostfile", *map(str, arguments)]
    if text is not None:
        job = ["sh", "-c", 'printf %s "$0" | "$@"', text, *job]
    return run_command(job, timeout=30, cwd=folder)


def test_local8_runs_ranks_on_this_machine():
    job = [installed_launcher(), "--hostfile", FOLDER / "local8", "-n", "2", "python3"]
    status, output, errors = run_command([*job, "-c", "import os; os.write(1, b'here\\n')"], timeout=40)
    assert status == 0, output + errors
    assert output.split() == ["here", "here"]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1:2\nnode2:2\n", TWICE_TWO),
        ("node1 slots=2\nnode2 slots=2", TWICE_TWO),
        ("node1\nnode1\nnode2\nnode2\n", TWICE_TWO),  # $PBS_NODEFILE
        ("node1\r\nnode2\r\n", [HostEntry("node1"), HostEntry("node2")]),
        ("node1\nnode2\nnode1\n", [HostEntry("node1", 2), HostEntry("node2")]),
        ("  # ours\n\n\tnode1:2  # rack 1\nnode2\tslots = 2\t#rack 2\n", TWICE_TWO),
        ("node1:2\nnode2 slots=1\nnode2", TWICE_TWO),
        ("a.example.org SLOTS=3", [HostEntry("a.example.org", 3)]),
        ("10.0.0.7:016", [HostEntry("10.0.0.7", 16)]),
        ("a_b-c slots=2 max-slots=4", [HostEntry("a_b-c", 2)]),
        ("a max_slots=4 slots=2", [HostEntry("a", 2)]),
        ("a max-slots=1", [HostEntry("a")]),
    ],
)
def test_forms_that_are_read(text, hosts):
    assert hosts_of(text) == hosts


@pytest.mark.parametrize(
    "line",
    [
        *("a:", "a:0", "a:two", "a:-1", "a:2:2", "a:2.5", "a:9999999999", ":2", "fe80::1", "[::1]:2"),
        *("a slots", "a slots=", "a slots=0", "a slots=x", "a slots=-1", "a slots=2 slots=2", "a slots=2,b"),
        *("a 2", "a b", "a,b", "me@a:2", "-a", "^a", "+n1", "a slot=2", "a slots=2 user=me", "node[1-4]"),
        *("a:2 slots=2", "a:2 max-slots=4", "a max-slots=0", "a slots=2 = 3", "ä:2"),
    ],
)
def test_other_lines_are_refused_with_their_number(line):
    with pytest.raises(UsageError, match=r"^FILE:3: expected ") as caught:
        hosts_of(f"# nodes\nnode1:2\n{line}\nnode2:2\n")
    assert repr(line) in str(caught.value)


def test_one_form_becomes_the_other():
    nodes = "node1 slots=2\nnode2 slots=2\n"
    assert convert(FOLDER / "two_nodes.openmpi", "--for", "mpich") == (0, "node1:2\nnode2:2\n", "")
    assert convert(FOLDER / "two_nodes.mpich", "--for", "openmpi") == (0, nodes, "")
    assert convert("-", "--for", "mpich", text="n1\nn2\nn1\n") == (0, "n1:2\nn2:1\n", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("bad --for mpich", "bad:2: .*'n2:x'"),
        ("nowhere --for mpich", "nowhere: "),
        ("binary --for mpich", "binary: "),
        ("empty --for mpich", "empty: "),
        ("bad", "--for"),
    ],
)
def test_bad_input_is_one_line(arguments, named, tmp_path):
    (tmp_path / "bad").write_text("n1\nn2:x\n")
    (tmp_path / "binary").write_bytes(b"n1\n\xff\xfe")
    (tmp_path / "empty").write_text("\n# nothing\n")
    status, printed, errors = convert(*arguments.split(), folder=tmp_path)
    assert (status, printed, errors.count("\n")) == (2, "", 1)
    assert re.match(f"zero_mpi hostfile: error: .*{named}", errors)


def test_the_installed_launcher_reads_what_is_written(tmp_path):
    """`hostfile` converts the other form of hostfile to the installed launcher's form."""
    start = installed_launcher()
    form, other = ("openmpi", "mpich") if launcher_kind() == "openmpi" else ("mpich", "openmpi")
    text = "".join(f"{LINES[other](HostEntry('localhost', count))}\n" for count in (1, 2))
    status, printed, errors = convert("-", "--for", form, text=text)
    assert (status, errors) == (0, "")
    (tmp_path / "hosts").write_text(printed)
    job = [start, "--hostfile", tmp_path / "hosts", "-n", "3", "python3", "-c"]
    job.append("import os; os.write(1, b'x')")
    assert run_command(job, timeout=40)[:2] == (0, "xxx")
