"""Jobs that make token files give the same bytes at any number of ranks and after any kills."""

import contextlib
import gzip
import json
import os
import random
import re
import signal
import subprocess
import time

import pytest
from jobs import clean_environment, end, hands_sigterm_on, launcher, run_job, warm_python
from random_kills import descendants
from test_command_bits import fields, needs_mpiexec, train
from test_newest_valid import everything as files

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.data.text_files import library_files

pytestmark = needs_mpiexec
TOKENIZE = ["-m", "zero_mpi", "tokenize"]
FLAGS = ["--tokenizer", "byte", "--part-mb", "0.03"]
KILLS, QUICK_KILLS = 20, 8
ENOUGH = 40.0  # seconds for a job on a busy machine


def tokenize(ranks, *flags, out, status=0):
    actual, printed, errors = run_job(ranks, [*TOKENIZE, *map(str, flags), "--out", str(out)], timeout=ENOUGH)
    assert actual == status, f"status {actual}\n{printed}\n{errors}"
    return printed, errors


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """Write a part of Python's library as files, lines and rows; return them with flags for many parts."""
    folder, texts, size = tmp_path_factory.mktemp("some") / "files", [], 0
    folder.mkdir()
    for _, path in library_files():
        texts.append(path.read_text("utf-8", "replace"))
        (folder / f"{size:07d}.py").write_text(texts[-1])
        size += path.stat().st_size
        if size > 1 << 20:
            break
    inputs = [folder, folder.with_name("lines.jsonl.gz")]
    inputs[1].write_bytes(gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts[:20]).encode()))
    with contextlib.suppress(ImportError):
        import pyarrow.parquet

        inputs.append(folder.with_name("rows.parquet"))
        pyarrow.parquet.write_table(pyarrow.table({"text": texts[20:40]}), inputs[2], row_group_size=3)
    return [*map(str, inputs), *FLAGS]


@pytest.fixture(scope="module")
def whole(some, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    tokenize(1, *some, out=out)
    assert len(list(out.glob("*.bin"))) > 20
    return files(out)


def start(ranks, flags, out, program=TOKENIZE):
    """Start a job whose ranks are forked from a process with the package loaded."""
    environ = clean_environment()
    command = [*launcher(), "-n", str(ranks), *warm_python(environ), *program, *flags, "--out", str(out)]
    return subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def kill(job):
    """Kill the launcher and all ranks. The server of warm starts kills ranks whose client is dead."""
    for process in [job.pid, *descendants(job.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    job.wait()


def complete_parts(out):
    return len(list((out / ".tokenize").glob("[0-9]*.json")))


@pytest.mark.timeout_seconds(300)
def test_killed_at_any_moment_and_started_again_it_has_the_same_bytes(some, whole, tmp_path, quick):
    """The job is killed after a random number of parts, and the same command continues it."""
    draw, out = random.Random(3), tmp_path / "out"
    for kill_number in range(QUICK_KILLS if quick else KILLS):
        job, parts = start(draw.choice([1, 2, 3]), some, out), complete_parts(out) + draw.choice([0, 1, 3, 9])
        try:
            while job.poll() is None and not (complete_parts(out) >= parts and (out / ".tokenize").exists()):
                time.sleep(0.001)
            kill(job)
        finally:
            end(job)
        if (out / "manifest.json").exists():
            tokenize(1, *some, out=out)
            assert files(out) == whole
            out = tmp_path / f"out{kill_number}"
    tokenize(3, *some, out=out)
    assert files(out) == whole


SLOWLY = """
import time
from zero_mpi.commands.tokenize import encode_parts
from zero_mpi.commands.tokenize.command import main

finish = encode_parts.PartWriter.finish

def slowly(self, about):
    finish(self, about)
    time.sleep(0.1)

encode_parts.PartWriter.finish = slowly
main()
"""


@pytest.mark.skipif(not hands_sigterm_on(), reason="this launcher kills its ranks")
def test_a_job_that_is_told_to_stop_is_to_be_requeued(some, whole, tmp_path):
    """Each part takes a tenth of a second, so that the signal comes before the job is done."""
    out, script = tmp_path / "out", tmp_path / "slowly.py"
    script.write_text(SLOWLY)
    job = start(2, some, out, [str(script)])
    try:
        begun = time.monotonic()
        while complete_parts(out) < 2 and job.poll() is None:
            assert time.monotonic() - begun < ENOUGH
            time.sleep(0.001)
        job.send_signal(signal.SIGTERM)
        assert job.wait(ENOUGH) == 75
    finally:
        end(job)
    assert 2 <= complete_parts(out) < len(whole) // 2
    tokenize(1, *some, out=out)
    assert files(out) == whole


HANGING = """
import os, signal
from mpi4py import MPI
from zero_mpi.commands.tokenize import encode_parts
from zero_mpi.commands.tokenize.command import main

usual = encode_parts.text_documents

def hangs(*arguments):
    if MPI.COMM_WORLD.Get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return usual(*arguments)

encode_parts.text_documents = hangs
main()
"""


def test_a_rank_that_stands_still_ends_the_job(some, whole, tmp_path):
    """If a rank hangs, --timeout ends the job after other ranks' parts; a second start completes it."""
    out, script = tmp_path / "out", tmp_path / "hanging.py"
    script.write_text(HANGING)
    job = [str(script), *some, "--out", str(out), "--timeout", "3"]
    status, _, errors = run_job(3, job, timeout=ENOUGH)
    assert status == 86, errors
    assert re.search(r"zero_mpi: .* rank 1 ", errors)
    assert re.search("zero_mpi: ranks? [02].*: writing token files, ", errors)
    assert not out.joinpath(".ranks").exists()
    tokenize(2, *some, out=out)
    assert files(out) == whole


def test_an_error_of_one_rank_is_one_line_from_all(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "good"}\n' * 9 + '{"text": 1}\n' * (number == 4))
    _, errors = tokenize(
        3, *sorted(tmp_path.glob("*.jsonl")), "--tokenizer", "byte", "--part-mb", "0.001",
        out=tmp_path / "out", status=2,
    )  # fmt: skip
    assert errors.count("\n") == 1
    assert "4.jsonl, line 10: " in errors


def test_a_run_on_the_folder_is_that_on_the_text_and_has_its_tokenizer(some, tmp_path):
    """Runs on text and on its token files have the same losses, and the checkpoint generates text."""
    tokenize(2, some[0], *FLAGS, out=tmp_path / "tokens")
    flags = ["--layers", "1", "--dim", "16", "--heads", "2", "--context", "16", "--batch-size", "3"]
    flags += ["--micro-batch", "1", "--steps", "3", "--warmup", "1", "--val-fraction", "0", "--sample", "4"]
    printed = train(2, tmp_path / "ids", "--data", str(tmp_path / "tokens"), *flags)
    train(1, tmp_path / "text", "--data", some[0], *flags)
    assert "sample of" in printed
    assert fields(tmp_path / "ids") == fields(tmp_path / "text")
    ids, text = (GGUFFile.open(tmp_path / name / "latest" / "model.gguf") for name in ("ids", "text"))
    keys = [key for key in text.metadata if key.startswith("tokenizer.")]
    assert [str(ids.metadata[key]) for key in keys] == [str(text.metadata[key]) for key in keys]
