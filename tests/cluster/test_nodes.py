"""The links' counters show that a step sends as many bytes between hosts as the plan predicts."""

import pytest
from hosts import why_no_hosts
from jobs import COMPILED

from zero_mpi.models import Llama
from zero_mpi.plan.case import Case
from zero_mpi.plan.traffic import plan_traffic

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

EACH, SHORT, LONG = 2, 2, 8  # ranks per host; steps of the short and of the long run
SIZES = {"layers": 4, "dim": 256, "heads": 4, "context": 32, "vocab_size": 256, "tied": False}
HEADERS = 1.08  # largest ratio of bytes on the link to payload bytes, because of packet headers
START = 0.01  # tolerance for start and end of a run, as a fraction of its bytes
FLAGS = ["--sample", "0", "--val-fraction", "0", "--warmup", "1", "--micro-batch", "1", "--resume", "never"]
FLAGS += [f"--{name}={SIZES[name]}" for name in ("layers", "dim", "heads", "context")]


def carried(cluster, hosts, out, steps, flags):
    before = cluster.traffic()
    job = ["-m", "zero_mpi.train", "--out", str(out), "--steps", str(steps), *FLAGS, *flags]
    status, printed, errors = cluster.run(hosts * EACH, EACH, job, timeout=200, env=COMPILED)
    assert status == 0, f"{printed}\n{errors}"
    assert f"shared inside {hosts} nodes of {EACH} ranks, mpi between them" in printed
    after = cluster.traffic()
    return [after[name].sent - before[name].sent for name in cluster.names[:hosts]]


@pytest.mark.timeout_seconds(240)
@pytest.mark.parametrize(("strategy", "hosts"), [("full-shard", 2), ("hybrid-shard", 4)])
def test_bytes_between_hosts(strategy, hosts, four_hosts, common_path):
    batch = 8
    flags = ["--strategy", strategy, "--batch-size", str(batch)]
    few, many = (carried(four_hosts, hosts, common_path / "out", steps, flags) for steps in (SHORT, LONG))
    sizes = {"ranks": hosts * EACH, "nodes": hosts, "batch_size": batch, "micro_batch": 1}
    case = Case(Llama.from_flags(SIZES), strategy_name=strategy, context=SIZES["context"], **sizes)
    planned = plan_traffic(case).between.reshape(hosts, EACH).sum(1)
    measured = [(m - f) / (LONG - SHORT) for f, m in zip(few, many, strict=True)]
    for host, (actual, expected) in enumerate(zip(measured, planned, strict=True)):
        small = 4 * EACH * plan_traffic(case).vectors.max()  # bytes of the vectors (losses, norms) of a step
        least, most = (1 - START) * expected, HEADERS * expected + small
        assert least <= actual <= most, (host, measured, planned.tolist())
