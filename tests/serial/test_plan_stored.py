"""The plan of a base in the blocks of its file: memory and traffic, compared with floats."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from zero_mpi.cli.text import size
from zero_mpi.commands.plan.command import read
from zero_mpi.errors import UsageError
from zero_mpi.models import Llama
from zero_mpi.models.lora import FROZEN, LoRA
from zero_mpi.ops.block_kinds import BLOCK_KINDS
from zero_mpi.plan.case import Case
from zero_mpi.plan.rank_memory import plan_memory
from zero_mpi.plan.traffic import plan_traffic

SIZES = {"layers": 30, "dim": 576, "heads": 9, "kv_heads": 3, "ffn": 1536, "context": 2048}
SMOLLM2 = Llama.from_flags(SIZES | {"vocab_size": 49152, "tied": True})
FLOATS = replace(SMOLLM2, lora=LoRA(8, 16.0))


def in_q4_0(model):
    kinds = {name: "Q4_0" if len(param.shape) == 2 else "F32" for name, param in model.params().items()}
    stored = tuple((name, BLOCK_KINDS[kind]) for name, kind in kinds.items())
    return replace(model, lora=LoRA(8, 16.0, stored=stored))


def test_adapters_beside_smollm2_take_a_quarter_of_its_training():
    full = Case(SMOLLM2, ranks=2, micro_batch=1, context=128, recompute=True)
    adapters = replace(full, model=in_q4_0(SMOLLM2), frozen=FROZEN)
    found, floats = plan_memory(adapters), plan_memory(replace(adapters, model=FLOATS))
    assert adapters.model.stored_bytes == 134_479_872 * 18 // 32 + 35_136 * 4
    assert 4 * found.total <= plan_memory(full).total
    assert found.unpacked == 4 * (49152 * 576 + block_elements())
    assert 6 * found.parameters < floats.parameters


def block_elements():
    return sum(-(-p.size // 1024) * 1024 for name, p in SMOLLM2.params().items() if name.startswith("blk.0."))


def test_what_travels_is_a_sixth():
    stored = Case(in_q4_0(SMOLLM2), ranks=2, transport_wanted="mpi", frozen=FROZEN)
    floats = replace(stored, model=FLOATS)
    sent = [plan_traffic(case) for case in (stored, floats)]
    assert (sent[0].gradients_inside == sent[1].gradients_inside).all()
    assert (6 * sent[0].parameters_inside < sent[1].parameters_inside).all()


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
