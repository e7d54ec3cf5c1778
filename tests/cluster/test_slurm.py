"""A batch job that was stopped for any reason resumes and gives the same bytes as an unbroken run.

The tests use a real Slurm of one node and the unchanged scripts of examples/slurm. A test passes
further options on sbatch's command line, as a user would.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import installed
from slurm import ROOT, Slurm, slurm, why_no_slurm
from test_command_bits import assert_same_run, fields, tensors, train, write_text
from test_stopping import assert_saved

REQUEUE, BAD_USAGE = 75, 2
SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--kv-heads", "1", "--ffn", "17", "--context", "16"]
SMALL += ["--batch-size", "7", "--micro-batch", "2", "--warmup", "2", "--sample", "0"]
STEPS = 300  # a run takes some seconds, because signals arrive late on a busy machine
ENDLESS = ["--schedule", "constant", "--steps", "1000000"]  # the constant rate does not depend on --steps
ONE_NODE = "examples/slurm/one_node.sbatch"
OPENMPI_AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # the node has fewer cores than it reports
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
SCRIPTS = sorted(path.name for path in (ROOT / "examples" / "slurm").glob("*.sbatch"))

pytestmark = [
    pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm()),
    pytest.mark.timeout_seconds(300),
]


@pytest.fixture(scope="module")
def up() -> Iterator[Slurm]:
    with slurm(cpus=8) as cluster:
        yield cluster


@pytest.fixture
def here(up) -> Iterator[Slurm]:
    yield up
    up.cancel_all()


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*SMALL, "--data", *write_text(tmp_path_factory.mktemp("text"))]


@pytest.fixture(scope="module")
def unbroken(flags, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    train(1, out, *flags, "--steps", str(STEPS))
    return out


def on_one_node(script: str, ranks: int) -> list[str]:
    return [f"--ntasks-per-node={ranks}", "--nodes=1"] + (["--gpus-per-node=1"] if "gpu" in script else [])


def prepared(cluster: Slurm, launch: str, mpi: str) -> tuple[str, dict[str, str]]:
    """Return python and variables for ranks of this MPI with this start method; skip if it is unavailable."""
    try:
        python, _ = installed(mpi)
    except LookupError as error:
        pytest.skip(str(error))
    if launch.startswith("srun") and (reason := cluster.why_no_launch(launch)):
        pytest.skip(reason)
    return python, {"LAUNCH": launch, **(OPENMPI_AS_ROOT if mpi == "openmpi" else {})}


def steps_done(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until_steps(cluster: Slurm, job: str, out: Path, count: int) -> None:
    cluster.until(lambda: steps_done(out) >= count, job, f"no {count} steps")


def assert_same_state(out: Path, reference: Path) -> None:
    """Check that curves and tensors are equal; keys are not compared, because --steps may differ."""
    assert fields(out) == fields(reference)
    for name in ("model.gguf", "optimizer.gguf"):
        actual, expected = tensors(out / "latest" / name), tensors(reference / "latest" / name)
        assert list(actual) == list(expected)
        assert [key for key in actual if actual[key].tobytes() != expected[key].tobytes()] == []


@pytest.mark.parametrize(
    ("script", "launch", "mpi"),
    [
        ("one_node.sbatch", "srun --mpi=pmi2", "mpich"),
        ("one_node.sbatch", "mpirun", "mpich"),
        ("one_node.sbatch", "srun --mpi=pmix", "openmpi"),
        ("one_node.sbatch", "mpirun", "openmpi"),
    ],
)
def test_a_job_told_to_stop_saves_is_requeued_and_goes_on(
    script, launch, mpi, here, flags, unbroken, tmp_path
):
    python, environ = prepared(here, launch, mpi)
    out = tmp_path / "out"
    job = here.submit(
        on_one_node(script, 4),
        f"examples/slurm/{script}",
        ["--out", str(out), *flags, "--steps", str(STEPS)],
        python=python,
        env=environ,
    )
    until_steps(here, job, out, 5)
    here.signal(job, "USR1")
    here.until(lambda: here.facts(job)["Restarts"] == "1", job, "not requeued")
    stopped = assert_saved(out)
    assert 5 <= stopped < STEPS
    here.wait(job, "COMPLETED")
    log = here.log(job)
    assert "over 4 ranks" in log
    assert f"stopped after step {stopped}; " in log
    assert f"at step {stopped}" in log.partition("stopped after")[2], "the log must continue"
    assert_same_run(out, unbroken)


def test_a_job_that_is_preempted_saves_and_goes_on(here, flags, unbroken, tmp_path):
    """Slurm itself sends SIGTERM because another job needs the full node."""
    _, environ = prepared(here, "srun --mpi=pmi2", "mpich")
    out = tmp_path / "out"
    job = here.submit(
        on_one_node("", 4), ONE_NODE, ["--out", str(out), *flags, "--steps", str(STEPS)], env=environ
    )
    until_steps(here, job, out, 5)
    here.command("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    here.until(lambda: here.facts(job)["Restarts"] == "1", job, "not requeued")
    stopped = assert_saved(out)
    assert 5 <= stopped < STEPS
    here.wait(job, "COMPLETED")
    assert f"at step {stopped}" in here.log(job)
    assert_same_run(out, unbroken)


def test_a_supervised_job_goes_on_in_its_allocation(here, flags, tmp_path):
    _, environ = prepared(here, "srun --mpi=pmi2", "mpich")
    out, steps = tmp_path / "out", ["--steps", "200", "--save-every", "30"]
    launch = f"zero-mpi supervise --backoff 0.2 -- {environ['LAUNCH']} -w {{hosts}} -N {{nodes}} -n {{ranks}}"
    job = here.submit(
        [*on_one_node("many_nodes.sbatch", 3), "--no-kill"],
        "examples/slurm/many_nodes.sbatch",
        ["--out", str(out), *flags, *steps],
        env={"LAUNCH": launch, "SLURM_WAIT": "3"},
    )
    until_steps(here, job, out, 40)
    os.kill(here.ranks(job)[1], signal.SIGKILL)
    here.until(lambda: "supervise: restart 1 of 10 from step-" in here.log(job), job, "not restarted")
    here.wait(job, "COMPLETED")
    assert here.facts(job)["Restarts"] == "0"
    train(1, tmp_path / "unbroken", *flags, *steps, timeout=150)
    assert_same_run(out, tmp_path / "unbroken")


def test_a_run_saves_before_its_job_is_ended_at_the_limit(here, flags, tmp_path):
    """The run saves by its own clock, before Slurm's signal (one second before the limit of one minute)."""
    out = tmp_path / "out"
    job = here.submit(
        [*on_one_node("", 3), "--time=1", "--signal=B:USR1@1"],
        ONE_NODE,
        ["--out", str(out), *flags, *ENDLESS],
    )
    here.wait(job, "RUNNING")
    begun = time.monotonic()
    here.until(lambda: here.facts(job)["Restarts"] == "1", job, "not requeued")
    assert 15 < time.monotonic() - begun < 60
    stopped = assert_saved(out)
    assert f"stopped after step {stopped} in time for the end of Slurm job {job};" in here.log(job)
    here.command("scancel", job)
    train(1, tmp_path / "reference", *flags, *ENDLESS[:-1], str(stopped), timeout=150)
    assert_same_state(out, tmp_path / "reference")


def test_a_cancelled_job_saves_and_stays_cancelled(here, flags, tmp_path):
    out = tmp_path / "out"
    job = here.submit(on_one_node("", 3), ONE_NODE, ["--out", str(out), *flags, *ENDLESS])
    until_steps(here, job, out, 5)
    here.command("scancel", job)
    here.wait(job, "CANCELLED")
    here.until(lambda: "stopped after step" in here.log(job), job, "not saved")
    assert_saved(out)
    time.sleep(3)
    facts = here.facts(job)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0")


def test_a_rank_that_is_killed_takes_the_job_along(here, flags, tmp_path):
    """By default srun lets the other ranks wait for the lost one. A job without a save is not requeued."""
    out = tmp_path / "out"
    job = here.submit(
        on_one_node("", 3), ONE_NODE, ["--out", str(out), *flags, *ENDLESS], env={"SLURM_WAIT": "3"}
    )
    until_steps(here, job, out, 5)
    os.kill(here.ranks(job)[1], signal.SIGKILL)
    begun = time.monotonic()
    here.wait(job, "FAILED")
    assert time.monotonic() - begun < 30
    assert here.facts(job)["Restarts"] == "0"


def test_the_tasks_of_an_array_go_on_one_after_the_other(here, flags, unbroken, tmp_path):
    """Tasks 1 and 2 are stopped, task 3 completes the run, and task 4 is cancelled."""
    out = tmp_path / "out"
    job = here.submit(
        [*on_one_node("", 4), "--array=1-4%1", f"--output={here.folder}/job-%A_%a.log"],
        "examples/slurm/array.sbatch",
        ["--out", str(out), *flags, "--steps", str(STEPS)],
    )
    stops = []
    for task in ("1", "2"):
        until_steps(here, f"{job}_{task}", out, 5 + max(stops, default=0))
        here.signal_ranks(f"{job}_{task}", "USR1")
        here.wait(f"{job}_{task}", "FAILED")
        assert here.facts(f"{job}_{task}")["ExitCode"] == f"{REQUEUE}:0"
        stops.append(assert_saved(out))
    here.wait(f"{job}_3", "COMPLETED")
    here.wait(f"{job}_4", "CANCELLED")
    assert 0 < stops[0] < stops[1] < STEPS
    assert f"at step {stops[1]}" in here.log(f"{job}_3")
    assert here.log(f"{job}_4") == ""
    assert_same_run(out, unbroken)


@pytest.mark.parametrize("start", [["srun", "--mpi=pmi2", "-n", "3"], ["salloc", "-Q", "-n", "3", "mpirun"]])
@pytest.mark.parametrize(
    ("more", "status"),
    [(["--max-time", "1s"], REQUEUE), (["--steps", "-1"], BAD_USAGE), (["--steps", "1"], 0)],
)
def test_the_status_of_a_run_comes_through_the_launcher(start, more, status, here, flags, tmp_path):
    """If a rank exited before MPI_Finalize, the launcher's status would be 137."""
    python, _ = prepared(here, "", "mpich")
    _, launcher = installed("mpich")
    command = [launcher if word == "mpirun" else word for word in start] + [python, "-m", "zero_mpi.train"]
    actual, printed, errors = here.run(*command, "--out", str(tmp_path / "out"), *flags, *more)
    assert actual == status, printed + errors
    assert errors.count("zero_mpi train: error:") == (status == BAD_USAGE)


@pytest.mark.parametrize("script", SCRIPTS)
def test_slurm_takes_the_header_of_every_script(script, here):
    """Slurm accepts the options of all scripts, and a job could start here with them."""
    here.command("sbatch", "--test-only", *on_one_node(script, 2), f"examples/slurm/{script}")
