"""`--peer-checkpoint N`: runs that die go on from copies in memory, with the bytes of an undisturbed run.

No checkpoint is on disk before the end. Ranks that count as hosts share one folder of memory here, in which a
host's files have its number: losing the host is removing them.
"""

import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from jobs import run_job
from test_command_bits import assert_same_run, needs_mpiexec, write_text
from thinned import thinned

from zero_mpi.checkpoint import copy_file, copy_record
from zero_mpi.checkpoint.best import Best
from zero_mpi.checkpoint.copy_file import NAME, PLACE, CopyFile, CopyPlace, record_of
from zero_mpi.checkpoint.copy_record import CopyRecord, read_record
from zero_mpi.checkpoint.state import TrainingProgress
from zero_mpi.comm.neighbours import ring
from zero_mpi.errors import FileError, UsageError
from zero_mpi.supervise.attempt import Attempt
from zero_mpi.supervise.launch_line import LaunchLine
from zero_mpi.supervise.run_facts import RunFacts
from zero_mpi.supervise.stop_request import StopRequest
from zero_mpi.telemetry.proof import JobStart, Proof, knows

SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16", "--sample", "0"]
SMALL += ["--batch-size", "4", "--micro-batch", "1", "--warmup", "2", "--steps", "10", "--eval-windows", "3"]
COPIES = ["--save-every", "0", "--peer-checkpoint", "3"]
EACH_A_HOST = {"ZERO_MPI_RANKS_PER_NODE": "1"}
# The last rank is killed in the ninth step, in which all have made the copies of steps 3 and 6.
DIES = """
import os, signal
from zero_mpi.train import command, trainer

rounds = trainer.Trainer.rounds

def rounds_until(self, number):
    if number == 8 and self.world.rank == self.world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rounds(self, number)

trainer.Trainer.rounds = rounds_until
command.main()
"""
NO_ROOM = """
from zero_mpi.train import command, memory_copies

memory_copies.room_in = lambda place, run: (1000, "h1")
command.main()
"""


def files_of(out):
    """The copies of runs that lie in memory now: those of one run, for a test has one."""
    found = sorted(path for path in PLACE.glob("*zero_mpi-copy-*") if NAME.fullmatch(path.name))
    return [path for path in found if path.name not in out.before]


class Broken:
    """A run of three ranks on three hosts that was killed, as often as it is asked for."""

    def __init__(self, folder: Path, text: list[str], flags: list[str], ranks: int = 3) -> None:
        self.before = {path.name for path in PLACE.iterdir()}
        self.out, self.aside, self.flags = folder / "out", folder / "aside", ["--data", *text, *SMALL, *flags]
        (folder / "dies.py").write_text(DIES)
        status, printed, _ = run_job(ranks, [str(folder / "dies.py"), *self.args], env=EACH_A_HOST)
        assert status not in (0, 2), printed
        shutil.copytree(self.out, self.aside, symlinks=True)
        self.memory = {path: path.read_bytes() for path in files_of(self)}

    @property
    def args(self) -> list[str]:
        return ["--out", str(self.out), *self.flags, *COPIES]

    def again(self) -> dict[tuple[str, int, int, int], Path]:
        """Everything as it was when the run was killed. Returns files by (kind, rank, host, step)."""
        for path in files_of(self):
            path.unlink()
        for path in self.out.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.copytree(self.aside, self.out, symlinks=True, dirs_exist_ok=True)
        found = {}
        for path, content in self.memory.items():
            path.write_bytes(content)
        for path in self.memory:
            rank, host, slot = (int(part) for part in path.name.removesuffix(".record").split("-")[-3:])
            kind = "record" if path.name.endswith(".record") else "elements"
            found[kind, rank, host, 3 if slot == 0 else 6] = path
        return found

    def go_on(self, *more, ranks=2, env=EACH_A_HOST):
        """The same command on other ranks: (status, what is printed, stderr)."""
        return run_job(ranks, ["-m", "zero_mpi.train", *self.args, *more], env=env)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    """The run to which nothing happened, on one rank."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    status, printed, _ = run_job(1, ["-m", "zero_mpi.train", "--out", str(out), "--data", *text, *SMALL])
    assert status == 0, printed
    return out


@pytest.fixture(scope="module")
def broken(text, tmp_path_factory):
    run = Broken(tmp_path_factory.mktemp("broken"), text, [])
    yield run
    for path in files_of(run):
        path.unlink()


def spoil(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-4])


# What happens to the files, and at which step the run goes on; None: at its beginning.
LOSSES = {
    "nothing": (lambda files: None, 6, ""),
    "a host": (lambda files: [path.unlink() for key, path in files.items() if key[2] == 1], 6, ""),
    "two neighbours": (lambda files: [path.unlink() for key, path in files.items() if key[2] != 2], None, ""),
    "elements at home": (lambda files: spoil(files["elements", 0, 0, 6]), 6, "its elements are not those"),
    "a record": (lambda files: spoil(files["record", 1, 1, 6]), 6, "is not the record that was written"),
    "the end of a file": (lambda files: cut(files["elements", 2, 0, 6]), 6, "bytes, found"),
    "both copies of a rank": (
        lambda files: [spoil(files["elements", 0, host, 6]) for host in (0, 1)],
        3,
        "its elements are not those",
    ),
    "a record, as while a copy is made": (
        lambda files: [files["record", 0, host, 6].unlink() for host in (0, 1)],
        3,
        "",
    ),
}


@needs_mpiexec
@pytest.mark.parametrize("what", thinned(LOSSES, 5))
def test_a_run_goes_on_from_the_newest_copies_that_are_whole(what, broken, unbroken):
    lose, step, said = LOSSES[what]
    lose(broken.again())
    status, printed, errors = broken.go_on()
    assert status == 0, errors
    if step is None:
        assert "resuming" not in printed
    else:
        assert f"resuming from the copies in memory of 3 rank(s) at step {step}\n" in printed
    assert said in printed + errors
    assert_same_run(broken.out, unbroken)
    assert (broken.out / "proof.jsonl").read_bytes() == (unbroken / "proof.jsonl").read_bytes()
    assert files_of(broken) == [], "they go with the end of the run"


@needs_mpiexec
@pytest.mark.parametrize("flags", [["--resume", "never"], ["--seed", "1"]])
def test_copies_of_what_is_another_run_are_never_read(flags, broken):
    before = broken.again()
    status, printed, errors = broken.go_on(*flags)
    assert status == 0, errors
    assert "resuming" not in printed
    assert files_of(broken) == ([] if flags[0] == "--resume" else sorted(before.values()))


@needs_mpiexec
def test_copies_of_another_history_are_passed_over(broken, unbroken):
    """The steps were made again without copies, so those in memory are of steps that were given up."""
    broken.again()
    path = broken.out / "proof.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    status, printed, errors = broken.go_on()
    assert status == 0, errors
    assert "those of step 6 are not of the history" in printed + errors
    assert "resuming" not in printed
    assert_same_run(broken.out, unbroken)


@needs_mpiexec
def test_a_run_that_finds_its_last_step_in_memory_saves_it(broken):
    """It has made all its steps, and none of them is on disk."""
    broken.again()
    status, printed, errors = broken.go_on("--steps", "6")
    assert status == 0, errors
    assert "changed since the checkpoint: --steps was 10, now 6" in printed + errors
    assert [path.name for path in broken.out.glob("step-*")] == ["step-00000006"]
    assert files_of(broken) == []


@needs_mpiexec
def test_a_later_checkpoint_goes_before_copies(text, unbroken, tmp_path):
    run = Broken(tmp_path, text, [])
    run.flags += ["--save-every", "4"]
    run.again()
    status, printed, errors = run_job(3, [str(tmp_path / "dies.py"), *run.args, "--save-every", "4"])
    assert status not in (0, 2)
    status, printed, errors = run.go_on(env={})
    assert status == 0, errors
    assert f"resuming from {run.out}/step-00000008 at step 8\n" in printed
    assert "survive the loss of a rank and not of the host" in printed + errors
    assert_same_run(run.out, unbroken)
    assert files_of(run) == []


@needs_mpiexec
def test_without_room_the_run_is_refused_in_one_line(text, tmp_path):
    (tmp_path / "full.py").write_text(NO_ROOM)
    args = [str(tmp_path / "full.py"), "--out", str(tmp_path / "out"), "--data", *text, *SMALL, *COPIES]
    status, _, errors = run_job(2, args)
    assert status == 2
    assert errors.count("\n") == 1
    assert "--peer-checkpoint 3: the copies take " in errors
    assert "of shared memory on h1, and /dev/shm has 1000 B for them: give it more room" in errors


KINDS = {
    "bf16": ["--precision", "bf16"],
    "an average": ["--ema", "0.9"],
    "frozen": ["--freeze", "blk.*"],
    "fp16, whose loss has a factor": ["--precision", "fp16"],
    "evaluations that count": ["--patience", "4", "--eval-every", "5", "--val-fraction", "0.3"],
    "behind training": ["--async-save"],
    "documents": ["--packing", "documents"],
}


@needs_mpiexec
@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_whatever_a_state_is_made_of_comes_back(kind, text, tmp_path):
    """On one rank, whose copies stay at home; the average is in a file of its own."""
    out = tmp_path / "whole"
    args = ["-m", "zero_mpi.train", "--out", str(out), "--data", *text, *SMALL, *KINDS[kind]]
    assert run_job(1, args)[0] == 0
    run = Broken(tmp_path, text, KINDS[kind], ranks=1)
    status, printed, errors = run.go_on(ranks=1)
    assert status == 0, errors
    assert "resuming from the copies in memory of 1 rank(s) at step 6" in printed
    assert_same_run(run.out, out)
    assert [path.read_bytes() for path in run.out.glob("latest/ema.gguf")] == [
        path.read_bytes() for path in out.glob("latest/ema.gguf")
    ]


@needs_mpiexec
def test_adapters_come_back_and_their_base_is_read_again(text, unbroken, tmp_path):
    lora = ["--init", str(unbroken / "latest" / "model.gguf"), "--lora", "2"]
    out, args = tmp_path / "whole", ["--data", *text, "--sample", "0", "--context", "16", "--batch-size", "4"]
    args += ["--steps", "10", "--eval-windows", "3", *lora]
    assert run_job(1, ["-m", "zero_mpi.train", "--out", str(out), *args])[0] == 0
    run = Broken.__new__(Broken)
    run.before = {path.name for path in PLACE.iterdir()}
    run.out, run.flags = tmp_path / "out", args
    (tmp_path / "dies.py").write_text(DIES)
    run_job(2, [str(tmp_path / "dies.py"), *run.args], env=EACH_A_HOST)
    status, printed, errors = run.go_on(ranks=1)
    assert status == 0, errors
    assert "resuming from the copies in memory of 2 rank(s) at step 6" in printed
    for name in ("adapter.gguf", "optimizer.gguf"):
        assert (run.out / "latest" / name).read_bytes() == (out / "latest" / name).read_bytes()


# the parts


def test_each_rank_has_a_keeper_on_the_next_host_and_keepers_share_the_work():
    assert [ring([0, 0, 0], rank).keeper for rank in range(3)] == [None] * 3
    for nodes in ([0, 1], [0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [0, 0, 0, 1], [0, 1, 1, 1, 2]):
        places = [ring(nodes, rank) for rank in range(len(nodes))]
        assert all(nodes[place.keeper] != nodes[rank] for rank, place in enumerate(places))
        kept = sorted((rank, place.keeper) for rank, place in enumerate(places))
        assert kept == sorted((rank, keeper) for keeper, place in enumerate(places) for rank in place.kept)
        sizes, most = Counter(nodes), max(len(place.kept) for place in places)
        assert most <= -(-max(sizes.values()) // min(sizes.values()))
        for node in sizes:
            assert len({nodes[place.keeper] for rank, place in enumerate(places) if nodes[rank] == node}) == 1


RECORD = CopyRecord(
    "ab12",
    1,
    3,
    TrainingProgress(7, 100, 1, 6, 14, 15, 3, Best(0.1 + 0.2, 4, 1)),
    "c0" * 32,
    "d1",
    (("model", "a.weight", 0, 5), ("optimizer", "m.a.weight", 1024, 7)),
    {"threads": 1},
    {"lr": 0.1},
)


def test_a_record_comes_back_to_the_last_bit(tmp_path):
    path = tmp_path / "x.record"
    path.write_bytes(RECORD.packed())
    assert read_record(path) == RECORD
    assert RECORD.nbytes == 48


@pytest.mark.parametrize("at", [0, 40, -2])
def test_a_record_with_another_bit_is_refused(at, tmp_path):
    path, content = tmp_path / "x.record", bytearray(RECORD.packed())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileError, match="is not the record that was written"):
        read_record(path)


def test_a_copy_takes_its_room_when_it_is_made_and_has_no_record_while_it_changes(tmp_path):
    file = CopyFile(CopyPlace("ab", "cd", 0, tmp_path).path(2, 1), 4000)
    assert file.path.stat().st_size == 4000
    assert file.path.stat().st_blocks * 512 >= 4000
    assert file.path.stat().st_mode & 0o777 == 0o600
    file.write(np.arange(1000, dtype=np.float32), 0)
    file.seal(b"x")
    assert record_of(file.path).exists()
    file.begin()
    assert not record_of(file.path).exists()
    file.close()


def test_only_copies_of_the_run_are_removed_and_some_of_it_may_stay(tmp_path):
    for run, job, slot in [("aa", "01", 0), ("aa", "01", 1), ("aa", "02", 1), ("bb", "01", 1)]:
        path = CopyPlace(run, job, 0, tmp_path).path(0, slot)
        path.touch()
        record_of(path).touch()
        (tmp_path / f".{path.name}.record.partial").touch()
    (tmp_path / "zero_mpi-copy-aa-no").touch()
    copy_file.remove("aa", ("01", "1"), tmp_path)
    left = Counter(path.name.removeprefix(".")[:20] for path in tmp_path.iterdir())
    assert left == {"zero_mpi-copy-aa-01-": 3, "zero_mpi-copy-bb-01-": 3, "zero_mpi-copy-aa-no": 1}
    copy_file.remove("aa", folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_elements_of_another_size_are_refused_before_they_are_read(tmp_path):
    path = CopyPlace("ab", "cd", 0, tmp_path).path(2, 1)
    path.write_bytes(bytes(44))
    record_of(path).write_bytes(RECORD.packed())
    with pytest.raises(UsageError, match="expected 48 bytes, found 44"):
        copy_record.look(record_of(path))
    path.unlink()
    with pytest.raises(UsageError, match="expected 48 bytes, found 0"):
        copy_record.look(record_of(path))


def test_a_chain_knows_its_own_heads_up_to_a_step(tmp_path):
    proof = Proof(tmp_path / "proof.jsonl", JobStart(0, {}))
    proof.record(1, {"loss": 1.0})
    first = proof.head
    proof.record(2, {"loss": 2.0})
    second = proof.head
    proof.close()
    path = tmp_path / "proof.jsonl"
    assert [knows(path, head, 1) for head in (first, second, "", "0" * 64)] == [True, False, False, False]
    assert knows(path, second, 2)
    assert not knows(tmp_path / "none", first, 2)


@pytest.mark.parametrize("copies", [False, True])
def test_for_a_supervisor_a_later_step_is_progress_where_the_run_is_copied(copies, tmp_path):
    facts = RunFacts(tmp_path, copies)
    found = Attempt(facts, StopRequest(), 900.0)
    assert facts.origin == "the start" + " or later copies in memory" * copies
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    assert found._has_progressed() == copies
    assert not Attempt(facts, StopRequest(), 900.0)._has_progressed()


def test_a_supervisor_reads_from_the_command_whether_a_run_is_copied(tmp_path):
    (tmp_path / "c.toml").write_text("peer_checkpoint = 5\n")
    train = ["mpirun", "-n", "2", sys.executable, "-m", "zero_mpi.train"]
    assert LaunchLine.of([*train, "--peer-checkpoint", "5"]).copies()
    assert LaunchLine.of([*train, "--config", str(tmp_path / "c.toml")]).copies()
    assert not LaunchLine.of([*train, "--out", "x"]).copies()
