"""The plan of a base in the blocks of its file: memory and traffic, compared with floats."""

import re
from pathlib import Path

import pytest

from zero_mpi.cli.text import size
from zero_mpi.commands.plan.command import read
from zero_mpi.errors import UsageError
from zero_mpi.plan.rank_memory import plan_memory


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--base q4_0", "--base q4_0: .*--lora RANK"),
        ("--base q4_0 --lora 2 --device cuda", "--base q4_0: .*GPU"),
    ],
)
def test_a_base_that_no_run_would_keep_is_refused(flags, said):
    with pytest.raises(UsageError, match=said):
        read(flags.split())


PAGE = Path(__file__).resolve().parents[2] / "docs" / "finetune.md"


def test_the_table_of_the_page_is_planned():
    """Each command of docs/finetune.md gives a row of its table; the last flags are the last column."""
    text = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^zero-mpi plan (.*) --lora 16 --base q4_0$", text, re.MULTILINE)
    rows = re.findall(r"^\| [0-9]+[MB] \| [0-9]+ \| (.*iB) \|$", text, re.MULTILINE)
    assert len(rows) == len(commands) == 4
    columns = ("", "--lora 16", "--lora 16 --base q8_0", "--lora 16 --base q4_0")
    for number, (row, sizes) in enumerate(zip(rows, commands, strict=True)):
        for column in range(4) if number == 0 else (0, 3):  # large models take seconds per column
            (case,) = read([*sizes.split(), *columns[column].split()]).cases
            assert size(plan_memory(case).total) == row.split(" | ")[column]
