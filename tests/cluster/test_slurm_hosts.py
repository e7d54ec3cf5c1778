"""A Slurm job of three nodes that loses one node continues and gives the same bytes as an unbroken run.

Each node is a host with its own slurmd. The lost node is switched off without notice, so Slurm has to detect
the loss. The script is the unchanged script of examples/slurm, with --no-kill, which keeps the job alive.
"""

from pathlib import Path

import pytest
from hosts import OPENMPI_FLAGS, Hosts, hosts, why_no_hosts
from slurm import ROOT, Slurm, slurm_over, why_no_slurm
from test_command_bits import assert_same_run, needs_mpiexec, train, write_text
from test_slurm import SMALL, prepared, until_steps

from zero_mpi.commands.report.runs import read_events

SCRIPT = "examples/slurm/many_nodes.sbatch"
STEPS = ["--steps", "400", "--save-every", "40", "--keep", "2", "--transport", "mpi"]
LOST_AFTER = 60  # step after which the node is lost
TIMEOUT = 12  # --timeout: a pause of the machine for some seconds must not cause a restart

pytestmark = [
    needs_mpiexec,
    pytest.mark.timeout_seconds(400),
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
    pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm()),
]


def submit(up: Slurm, cluster: Hosts, launch: str, mpi: str) -> tuple[str, Path]:
    python, environ = prepared(up, launch, mpi)
    texts, out = write_text(cluster.folder), cluster.folder / "out"
    layout = (
        "-w {hosts} -N {nodes} -n {ranks}"
        if launch.startswith("srun")
        else "-machinefile {hostfile} -n {ranks}"
    )
    flags = f"--backoff 0.2 --probe-timeout 20 --for {mpi}"
    supervised = f"zero-mpi supervise {flags} -- {launch} {layout}"
    job = up.submit(
        ["--nodes=3", "--ntasks-per-node=1", "--no-kill"],
        SCRIPT,
        ["--out", str(out), "--data", *texts, *SMALL, *STEPS, "--timeout", str(TIMEOUT)],
        python=python,
        env=environ | {"LAUNCH": supervised, "SLURM_WAIT": "3", "PYTHONPATH": str(ROOT)},
    )
    return job, out


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    train(1, folder / "out", "--data", *write_text(folder), *SMALL, *STEPS, timeout=150)
    return folder / "out"


@pytest.mark.parametrize(
    ("launch", "mpi"),
    [("srun --mpi=pmi2", "mpich"), ("mpirun", "mpich"), (f"mpirun {OPENMPI_FLAGS}", "openmpi")],
)
def test_a_job_goes_on_without_a_node_that_is_lost(launch, mpi, unbroken):
    with hosts(3) as cluster, slurm_over(cluster) as up:
        job, out = submit(up, cluster, launch, mpi)
        until_steps(up, job, out, LOST_AFTER)
        cluster.lose("h3")
        up.until(lambda: "supervise: restart 1 of 10 from step-" in up.log(job), job, "not restarted")
        up.wait(job, "COMPLETED")
        log, facts = up.log(job), up.facts(job)
        assert "on 2 hosts (h1, h2), 2 ranks; left out (no answer): h3" in log, log
        assert facts["Restarts"] == "0"
        (event,) = [event for event in read_events(out / "events.jsonl") if event["event"] == "restarted"]
        assert (event["hosts"], event["silent"]) == (["h1", "h2"], ["h3"])
        assert_same_run(out, unbroken)
