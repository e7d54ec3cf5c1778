"""Training adapters writes the same files for a base in GGUF blocks as for a base in floats."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import tiny
import tiny_blocks
from jobs import run_job
from test_command_bits import fields, needs_mpiexec, train
from test_lora import DATA, files
from test_resume import refused

from zero_mpi import SerialComm, ShardedAdamW, ShardedModule, save
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.commands.plan.command import command
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World
from zero_mpi.models.lora import FROZEN, LoRA
from zero_mpi.ops.block_kinds import BLOCK_KINDS

SIZES = ["--arch", "llama", "--dim", "64", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--ffn", "96"]
IN_FLOATS = """
from zero_mpi.config import inputs
inputs.BLOCK_KINDS = {}
from zero_mpi.train.command import main
main()
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text("".join(f"line {n} of {n * n}\n" for n in range(400)))
    text = ["--data", str(folder / "text.txt")]
    train(1, folder / "run", *SIZES, *DATA, *text, "--steps", "1")
    path = folder / "base.gguf"
    command = ["-m", "zero_mpi", "export", str(folder / "run/latest"), str(path), "--type", "q4_0"]
    assert run_job(1, command)[0] == 0
    assert {info.type.name for info in GGUFFile.open(path).tensors.values()} >= {"Q4_0", "F32"}
    return ["--init", str(path), *DATA, *text, "--lora", "3", "--steps", "4"]


@pytest.fixture(scope="module")
def in_floats(base, tmp_path_factory):
    """Run one rank whose base is float32 from the start."""
    out = tmp_path_factory.mktemp("floats") / "run"
    status, printed, _ = run_job(1, ["-c", IN_FLOATS, *base, "--out", str(out)])
    assert status == 0
    assert "are kept as floats" in printed
    return out


@needs_mpiexec
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, []),
        (2, ["--strategy", "no-shard", "--async-save"]),
        (3, ["--transport", "mpi", "--recompute", "--prefetch", "2"]),
        (5, ["--strategy", "shard-grad-op"]),
        (2, ["--transport", "mpi", "--check-collectives", "--checkpoint-io", "parallel"]),
    ],
)
def test_the_same_files_as_in_floats(ranks, more, base, in_floats, tmp_path):
    train(ranks, tmp_path / "run", *base, *more)
    assert files(tmp_path / "run") == files(in_floats)
    assert fields(tmp_path / "run") == fields(in_floats)


@needs_mpiexec
def test_sizes_and_a_type_are_planned_as_the_file_is(base, capsys):
    assert command(World(0, 1), [*base, "--ranks", "2"]) == 0
    planned = capsys.readouterr().out
    assert command(World(0, 1), [*SIZES, *base[2:], "--base", "q4_0", "--ranks", "2"]) == 0
    assert capsys.readouterr().out == planned
    with pytest.raises(UsageError, match=r"--base f16: .*--init"):
        command(World(0, 1), [*base, "--base", "f16"])


@needs_mpiexec
def test_a_resume_reads_the_blocks_again(base, in_floats, tmp_path):
    train(3, tmp_path / "run", *base[:-1], "2")
    train(2, tmp_path / "run", *base)
    assert files(tmp_path / "run") == files(in_floats)


@needs_mpiexec
def test_a_scale_that_is_not_finite_is_refused(base, tmp_path):
    broken = tmp_path / "broken.gguf"
    shutil.copy(base[1], broken)
    file = GGUFFile.open(broken)
    info = file.tensors["blk.1.ffn_down.weight"]
    with broken.open("r+b") as raw:
        raw.seek(info.offset + info.nbytes - 18)
        raw.write(np.float16(np.inf).tobytes())
    message = refused(2, tmp_path / "run", "--init", str(broken), *base[2:])
    assert f"{broken}: tensor blk.1.ffn_down.weight holds values that are not finite" in message


@pytest.fixture(scope="module")
def module():
    return tiny_blocks.make(SerialComm(), *tiny_blocks.base(False))


def test_what_is_in_blocks_has_no_elements_to_write(module, tmp_path):
    for ask in (module.parameters, module.shard_info, lambda: list(module.named_parameters())):
        with pytest.raises(ValueError, match="load_stored"):
            ask()
    with pytest.raises(ValueError, match="load_stored"):
        module.initialize(0)
    with pytest.raises(ValueError, match=r"save: expected .*\(stored\)"):
        save(tmp_path / "saved", module, ShardedAdamW(module))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "kind", "more", "said"),
    [
        ("output.weight", "Q8_0", {"by_rows": True}, "not sharded by rows"),
        ("nobody", "Q8_0", {}, "'nobody': expected the name of a frozen parameter"),
        ("blk.0.attn_q.weight.lora_a", "F32", {}, "expected the name of a frozen parameter"),
        ("output_norm.weight", "Q4_0", {}, "output_norm.weight: expected blocks of 32 elements"),
    ],
)
def test_what_cannot_be_stored_is_refused(name, kind, more, said):
    stages = replace(tiny.MODELS["llama"], lora=LoRA(3, 6.0)).stages()
    with pytest.raises(ValueError, match=said):
        ShardedModule(stages, SerialComm(), frozen=FROZEN, stored={name: BLOCK_KINDS[kind]}, **more)
