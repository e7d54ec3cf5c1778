"""The example hostfiles are read by the launcher that is installed."""

from pathlib import Path

import pytest
from jobs import launcher, run_command

FOLDER = Path(__file__).resolve().parents[2] / "hostfiles"


def test_local8_runs_ranks_on_this_machine():
    try:
        start = launcher()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    command = [
        *start,
        "--hostfile",
        FOLDER / "local8",
        "-n",
        "2",
        "python3",
        "-c",
        "import os; os.write(1, b'here\\n')",
    ]
    status, output, errors = run_command(command, timeout=40)
    assert status == 0, output + errors
    assert output.split() == ["here", "here"]


def lines(name: str) -> list[str]:
    """The lines of a hostfile that name hosts."""
    return [line for line in (FOLDER / name).read_text().splitlines() if not line.startswith("#")]


def test_local8_has_eight_slots_in_the_form_both_launchers_read():
    assert lines("local8") == ["localhost"] * 8


def test_two_nodes_have_two_slots_each_in_the_form_of_their_launcher():
    assert lines("two_nodes.mpich") == ["node1:2", "node2:2"]
    assert lines("two_nodes.openmpi") == ["node1 slots=2", "node2 slots=2"]


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_every_hostfile_shows_its_command_in_whole_line_comments(path):
    comments = [line for line in path.read_text().splitlines() if "#" in line]
    assert all(line.startswith("#") for line in comments)  # MPICH reads no comment after a name
    assert any(f"hostfiles/{path.name} -n " in line for line in comments)
