"""`--dry-run` prints what the run would do, and changes nothing."""

import json
import re
import shutil
import sys
from functools import partial

import pytest
from jobs import run_command, run_job
from test_command_bits import needs_mpiexec

from zero_mpi.commands.plan import command as flags
from zero_mpi.config.command_line import parse
from zero_mpi.errors import UsageError
from zero_mpi.plan.machine import ASSUMED
from zero_mpi.plan.plan import make_plan
from zero_mpi.plan.rank_memory import checkpoint_bytes
from zero_mpi.plan.report import memory_lines, traffic_lines
from zero_mpi.train.command import check_disk

SMALL = "--layers 2 --dim 32 --heads 2 --context 16 --batch-size 6 --micro-batch 2 --eval-every 0 --sample 0"
FLAGS = ["--data", "text", "--out", "run", *SMALL.split()]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").write_text("what people look at, before they begin\n" * 40)
    return tmp_path


def train(ranks, folder, *flags):
    return run_job(ranks, ["-m", "zero_mpi.train", *FLAGS, *flags], cwd=folder, timeout=50)


def tree(folder):
    return [
        (path, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    ]


@needs_mpiexec
def test_memory_and_traffic_are_the_plans_and_the_runs(folder):
    before = tree(folder)
    status, printed, errors = train(3, folder, "--steps", "2", "--strategy", "shard-grad-op", "--dry-run")
    assert (status, errors) == (0, "")
    assert tree(folder) == before
    config = parse([*SMALL.split(), "--strategy", "shard-grad-op"])
    case = flags.make_case(config, flags.find_model(config), 3, 1)
    plan = make_plan(case, ASSUMED)
    for line in (*memory_lines([plan]), *traffic_lines([plan])):
        assert printed.count(f"{line}\n") == 1, line
    assert "transport  shared memory of the node (chosen by --transport auto)\n" in printed
    assert "step       96 tokens: 192 in total\n" in printed
    assert train(3, folder, "--steps", "2", "--strategy", "shard-grad-op")[0] == 0
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert re.search(rf"rank 0 \(sent_bytes\) +{records[-1]['sent_bytes']:,}\n", printed)


@needs_mpiexec
def test_it_says_where_the_run_would_go_on_and_changes_nothing(folder):
    assert train(1, folder, "--steps", "2", "--save-every", "1")[0] == 0
    out = folder / "run"
    (out / ".step-00000009.partial").mkdir()  # a run would remove this folder
    newest = out / "step-00000002" / "model.gguf"
    sound = newest.read_bytes()
    (folder / "old.toml").write_text('audit_action = "stop"\n')
    before = tree(folder)
    status, printed, errors = train(2, folder, "--config", "old.toml", "--steps", "5", "--dry-run")
    assert (status, errors, tree(folder)) == (0, "", before)
    assert re.search(r"(?m)^begins +at step 2, from \S+/step-00000002: 3 step\(s\) left$", printed)
    assert re.search(r"(?ms)^note +--config: .* audit_action$.* changed .*: --steps was 2, now 5$", printed)
    newest.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    printed = train(1, folder, "--steps", "5", "--dry-run")[1]
    assert re.search(r"(?m)^begins +at step 1, from ", printed)
    assert re.search(r"(?m)^note +.* checkpoint.*: .*step-00000002", printed)


@needs_mpiexec
def test_what_a_run_would_refuse_is_refused_with_the_same_line(folder):
    assert train(1, folder, "--steps", "1")[0] == 0
    before = tree(folder)
    for options in (["--seed", "1"], ["--freeze", "nothing*"], ["--context", "4096"]):
        dry = train(1, folder, *options, "--dry-run")
        assert tree(folder) == before
        assert dry[0] == 2, dry
        assert len(dry[2].splitlines()) == 1
        real = train(1, folder, *options)
        assert real == dry
        before = tree(folder)


def test_without_mpirun_it_says_what_it_left_out(folder):
    command = [sys.executable, "-m", "zero_mpi.train", *FLAGS, "--dry-run", "--init", "nowhere.gguf"]
    status, printed, errors = run_command(command, timeout=30, cwd=folder)
    assert (status, printed) == (2, "")
    assert "nowhere.gguf" in errors
    status, printed, errors = run_command(command[:-2], timeout=30, cwd=folder)
    assert (status, errors) == (0, "")
    assert "mpirun" in printed.splitlines()[1]
    assert not (folder / "run").exists()


@needs_mpiexec
def test_a_model_that_shared_memory_cannot_hold_would_go_by_messages(folder):
    """A dry run of a huge model plans messages, allocates no parameters, and fails for lack of memory."""
    huge = ["--layers", "64", "--dim", "16384", "--heads", "64"]
    status, printed, errors = train(2, folder, *huge, "--dry-run")
    assert status == 2
    assert re.fullmatch(
        r"zero_mpi train: error: .* parameters, gradients and moments .*3.0 TiB on \S+ "
        r"\(206,[0-9,]+ parameters\), .* GiB .*--mem.*\n",
        errors,
    )
    strip = partial(re.sub, "[0-9.]+ GiB are free", "")
    assert strip(train(2, folder, *huge)[2]) == strip(errors)
    assert re.search(
        r"(?m)^transport +messages, because \S+ MiB of shared memory .*/dev/shm has .* free "
        r"\(chosen by --transport auto\)$",
        printed,
    )
    assert re.search(r"(?m)^writes .* free$", printed)


@needs_mpiexec
def test_a_checkpoint_is_as_large_as_it_says(folder):
    adapters = ["--init", str(folder / "run" / "latest" / "model.gguf"), "--lora", "16", "--dim", "32"]
    for name, options in {"run": [], "average": ["--ema", "0.9"], "adapters": adapters}.items():
        options = [*options, "--steps", "1", "--out", name]
        printed = train(1, folder, *options, "--dry-run")[1]
        match = re.search(r"(?m)^writes .*, about ([0-9.]+) ([KM])iB each, ", printed)
        status, _, errors = train(1, folder, *options)
        assert (status, errors) == (0, "")
        total = sum(path.stat().st_size for path in (folder / name / "step-00000001").iterdir())
        keys = 40_000  # maximum bytes of keys, names and digests in the files of a checkpoint
        assert total - keys < float(match[1]) * 2 ** {"K": 10, "M": 20}[match[2]] < total


def test_a_disk_that_is_nearly_full_is_told_or_refused(folder, monkeypatch):
    """The run needs disk space for the kept checkpoints and one more, minus the existing checkpoints."""
    monkeypatch.chdir(folder)
    size = checkpoint_bytes(flags.make_case(parse(FLAGS), flags.find_model(parse(FLAGS)), 1, 1))
    cases = [(4, 3, 0, False, False), (3.9, 3, 0, False, True), (3.9, 3, 1, False, False)]
    cases += [(1, 3, 9, False, False), (1.9, 1, 0, False, True), (0.9, 3, 9, True, False)]
    for checkpoints, keep, count, refused, warned in cases:
        usage = shutil._ntuple_diskusage(0, 0, int(checkpoints * size))
        monkeypatch.setattr(shutil, "disk_usage", lambda place, usage=usage: usage)
        for number in range(count):
            (folder / "run" / f"step-{number:08}").mkdir(parents=True, exist_ok=True)
        config = parse([*FLAGS, "--steps", "9", "--keep", str(keep), "--resume", "never"])
        if refused:
            with pytest.raises(UsageError, match=r"^--out run: "):
                check_disk(config, flags.find_model(config))
        else:
            assert bool(check_disk(config, flags.find_model(config))) == warned
        shutil.rmtree(folder / "run", ignore_errors=True)
