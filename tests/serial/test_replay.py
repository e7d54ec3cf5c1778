"""OUT/config.toml continues a run from any folder; a finished run is not changed."""

import tomllib
from pathlib import Path

from jobs import run_job, status_of
from test_command_bits import fields, needs_mpiexec, train, write_text

SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16"]
SMALL += ["--batch-size", "6", "--micro-batch", "1", "--warmup", "2", "--schedule", "constant"]


def snapshot(out: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "status.json"
    }


@needs_mpiexec
def test_the_file_goes_on_with_the_run_from_another_folder(tmp_path):
    """The run had relative paths and `--resume never`; config.toml resumes it from another folder."""
    write_text(tmp_path)
    train(1, tmp_path / "base", *SMALL, "--data", "text-0-0.txt", "--steps", "2", "--sample", "0")
    flags = ["--init", "base/latest/model.gguf", "--data", "text-0-1.txt"]
    flags += ["--out", "run", "--resume", "never"]
    train(2, tmp_path / "run", *SMALL, *flags, "--steps", "3", "--sample", "0")
    (tmp_path / "other").mkdir()
    command = ["-m", "zero_mpi.train", "--config", str(tmp_path / "run" / "config.toml"), "--steps", "5"]
    status, printed, errors = run_job(2, command, cwd=tmp_path / "other", timeout=30)
    assert (status, errors) == (0, ""), printed
    assert "step-00000003 at step 3" in printed
    assert [step for step, *_ in fields(tmp_path / "run")] == ["1", "2", "3", "4", "5"]
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["resume"] == "auto"
    assert not list((tmp_path / "other").iterdir())


@needs_mpiexec
def test_a_run_that_is_done_says_so_and_stays_as_it_is(tmp_path):
    flags = [*SMALL, "--data", *write_text(tmp_path), "--sample", "9"]
    assert "sample of" in train(2, tmp_path / "run", *flags, "--steps", "3")
    before, record = snapshot(tmp_path / "run"), status_of(tmp_path / "run")
    assert (record["steps"], record["ranks"], record["reason"]) == (3, 2, "")
    assert record["started"] < record["updated"]
    for steps in ("3", "2"):
        printed = train(2, tmp_path / "run", *flags, "--steps", steps)
        (line,) = printed.splitlines()
        assert f"nothing to do: {tmp_path}/run/step-00000003 is at step 3, and --steps is {steps}; " in line
        assert "--out" in line
        assert snapshot(tmp_path / "run") == before
        record = status_of(tmp_path / "run")
        assert (record["state"], record["step"]) == ("done", 3)
