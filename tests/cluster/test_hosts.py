"""Training over several hosts gives the same bytes as one process.

Each row of TABLE is a job over TCP between hosts of two ranks each. The curve and the checkpoint are compared
with those of one process, as in `test_command_bits.py` on one host.
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, installed, why_no_hosts
from jobs import COMPILED, run_command
from keeper import TOOLS
from test_command_bits import MODELS, SETTINGS, SIZES, assert_same_run, train_compiled, write_text

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

# Seven micro-batches take two rounds on four ranks, the last with three; of eight ranks one is idle.
FLAGS = [*SIZES, *SETTINGS, *MODELS["llama-tied"], "--batch-size", "7", "--micro-batch", "1"]
TABLE = """
    mpi      hosts  strategy       transport
    mpich    2      full-shard     mpi
    mpich    2      no-shard       mpi
    mpich    4      no-shard       mpi
    mpich    4      hybrid-shard   mpi
    mpich    2      full-shard     auto
    mpich    2      shard-grad-op  auto
    mpich    2      hybrid-shard   auto
    mpich    4      full-shard     auto
    mpich    4      hybrid-shard   auto
    openmpi  2      full-shard     mpi
    openmpi  2      shard-grad-op  mpi
    openmpi  2      no-shard       mpi
    openmpi  4      full-shard     mpi
    openmpi  4      shard-grad-op  mpi
    openmpi  4      no-shard       mpi
    openmpi  2      full-shard     auto
    openmpi  4      hybrid-shard   auto
"""
HEADER, *ROWS = [tuple(row.split()) for row in TABLE.strip().splitlines()]
EACH = 2  # ranks per host
OF_LAUNCHER = re.compile(r"\[h1:\d+\] plm:ssh: Warning: setpgid.*\n")  # a warning of Open MPI's ssh starter


def train_on(cluster: Hosts, ranks: int, out: Path, *flags: str, mpi: str = "mpich", each: int = EACH) -> str:
    job = ["-m", "zero_mpi.train", "--out", str(out), *flags]
    status, printed, errors = cluster.run(ranks, each, job, mpi=mpi, timeout=200, env=COMPILED)
    assert (status, OF_LAUNCHER.sub("", errors)) == (0, ""), f"status {status}\n{printed}\n{errors}"
    return printed


def need(mpi: str) -> None:
    try:
        installed(mpi)
    except LookupError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def one_process() -> Iterator[tuple[Path, list[str]]]:
    folder = Path(tempfile.mkdtemp(prefix="zero_mpi-test-", dir="/var/tmp"))
    flags = ["--data", *write_text(folder), *FLAGS]
    train_compiled(1, folder / "one", *flags)
    yield folder / "one", flags
    shutil.rmtree(folder)


@pytest.mark.timeout_seconds(240)
@pytest.mark.parametrize(HEADER, ROWS, ids=["-".join(row) for row in ROWS])
def test_same_bytes_as_in_one_process(mpi, hosts, strategy, transport, one_process, four_hosts, common_path):
    need(mpi)
    expected, flags = one_process
    flags = [*flags, "--strategy", strategy, "--transport", transport]
    printed = train_on(four_hosts, int(hosts) * EACH, common_path / "out", *flags, mpi=mpi)
    assert f"{strategy} over {int(hosts) * EACH} ranks" in printed
    texts = {"mpi": "mpi\n", "auto": f"shared inside {hosts} nodes of {EACH} ranks, mpi between them"}
    assert f"transport: {texts[transport]}" in printed
    assert_same_run(common_path / "out", expected)


@pytest.mark.timeout_seconds(440)
def test_most_of_the_transfers_hide_behind_computation():
    """With FULL_SHARD over a slow link, transfers overlap with computation of about the same duration.

    Blocks sleep instead of computing, so the result hardly depends on the machine's cores. Of 36 transfers,
    three cannot overlap: the first gather, the first gather of backward and the last reduction.
    """
    need("mpich")
    script = TOOLS.parents[1] / "benchmarks" / "overlap.py"
    sizes = {"layers": 12, "width": 192, "heads": 4, "ffn": 512, "context": 16, "batch": 1}
    flags = ["--rate", "50mbit", "--asleep", "140", "--steps", "1", "--warmup", "1", "--json"]
    flags += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    for _ in range(2):  # other load on the machine can only reduce the overlap
        status, printed, errors = run_command([sys.executable, script, *flags], timeout=200)
        assert (status, errors) == (0, ""), printed
        figures = json.loads(printed)
        if figures["hidden"] >= 0.7:
            break
    assert figures["rate"] == "50mbit"
    least = 1e3 * figures["sent"] * 8 / 50  # milliseconds that the bytes of one direction take on the link
    assert 0.9 * least < figures["transfers"] < 2 * least
    assert 12 * 3 * 140 <= figures["computation"] < figures["step"]
    assert figures["hidden"] >= 0.7, figures
    # With immediate waits nothing overlaps, so the time is about sleep plus transfer.
    assert figures["at once"] > max(figures["step"], 0.9 * (12 * 3 * 140 + least)), figures
