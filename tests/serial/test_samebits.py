"""A trial of the operations finds ranks and resumes that compute different bits; messages say what differs.

Environment variables simulate other processors: OPENBLAS_CORETYPE selects the kernels of matmuls.
"""

import json
import os
import platform
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from jobs import REFERENCE, launcher, run_command
from test_command_bits import needs_mpiexec, train, write_text
from test_consistency import FLAGS, RUN, refused

from zero_mpi import ops
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import check_digests, open_checkpoint
from zero_mpi.device.arrays import RECYCLED
from zero_mpi.errors import UsageError
from zero_mpi.ops import trial
from zero_mpi.ops.registry import OPERATIONS
from zero_mpi.telemetry import log
from zero_mpi.train import description as same_bits

MACHINE = {"threads": 1, "operations": "numpy", "BLAS": "K 1"}
MACHINE |= {"code for": "a", "processor": "A", "trial": "0"}
EXACT = {"dequantize"}  # operations with equal bits on all processors: products of integers and scales
NAMES = sorted(OPERATIONS.keys() - EXACT)
KERNELS = {"OPENBLAS_CORETYPE": "Nehalem"}  # kernels for an older processor than any that runs the tests
several_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="BLAS uses only one thread here")
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernel names are for x86-64")


def hosts(*machines):
    return [(f"node{number}", machine) for number, machine in enumerate(machines)]


def test_the_trial_repeats_and_leaves_no_memory():
    first = trial.digest()
    nbytes = RECYCLED.nbytes
    assert trial.digest() == first
    assert len(first) == 16
    assert RECYCLED.nbytes <= nbytes


def nudged(name, operation):
    """Return an operation whose result differs in one element by one unit in the last place."""

    def nudge(*args, **named):
        output = operation(*args, **named)
        result = output[0] if isinstance(output, tuple) else output
        if not isinstance(result, np.ndarray):  # a loss and its gradient
            added_to = args[{"adamw": 0, "moving_average": 0, "grouped_linear_backward_w": 2}.get(name, -1)]
            result = output[1] if isinstance(output, tuple) else added_to
        result.flat[0] = np.nextafter(result.flat[0], np.inf, dtype=result.dtype)
        return output

    return nudge


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_is_tried_and_one_bit_of_it_shows(name, monkeypatch):
    before = trial.digest()
    monkeypatch.setattr(ops, name, nudged(name, getattr(ops, name)))
    assert trial.digest() != before


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_the_trial_of_a_run_in_low_precision_tries_that_as_well(kind, monkeypatch):
    first = trial.digest(kind)
    assert trial.digest(kind) == first != trial.digest()
    gelu = ops.gelu
    monkeypatch.setattr(ops, "gelu", lambda x: gelu(x) if x.dtype == np.float32 else gelu(x) + x)
    assert trial.digest(kind) != first


DIGEST = """
import json, zero_mpi
from threadpoolctl import threadpool_limits
from zero_mpi.train import description as samebits
with threadpool_limits({threads}):
    print(json.dumps(samebits.machine_facts({threads}, "float32")))
"""


def elsewhere(threads=1, **variables):
    base = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environ = base | {"ZERO_MPI_OPS": "reference", "OPENBLAS_NUM_THREADS": "2"} | variables
    command = [sys.executable, "-c", DIGEST.format(threads=threads)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@x86
def test_other_kernels_of_products_are_other_bits_in_any_process():
    first, second, other = elsewhere(), elsewhere(PYTHONHASHSEED="7"), elsewhere(**KERNELS)
    assert first == second
    assert [key for key in first if first[key] != other[key]] == ["BLAS", "trial"]


@several_cores
def test_another_number_of_threads_shows_in_the_trial():
    assert elsewhere(1)["trial"] != elsewhere(2)["trial"]


def test_ranks_that_compute_alike_are_none_the_worse_for_other_names():
    other = MACHINE | {"processor": "B", "code for": "b", "BLAS": "K 2"}
    same_bits.check_bits(hosts(MACHINE, other, MACHINE), True, [])
    same_bits.check_bits(hosts(MACHINE), True, [])


@pytest.mark.parametrize(
    ("change", "here", "there"),
    [
        ({"threads": 2}, "threads 2", "threads 1"),
        ({"trial": "1", "processor": "B"}, "processor B", "processor A"),
        ({"trial": "1", "threads": 4, "BLAS": "K 2"}, "threads 4, BLAS K 2", "threads 1, BLAS K 1"),
        ({"trial": "1"}, "trial 1", "trial 0"),
        ({"trial": "1", "processor": "B\x1b\n"}, "processor B\\x1b\\n", "processor A"),
    ],
    ids=str,
)
def test_a_rank_of_other_bits_is_refused_by_what_is_known(change, here, there):
    odd = MACHINE | change
    with pytest.raises(UsageError) as refusal:
        same_bits.check_bits(hosts(MACHINE, MACHINE, odd), True, [])
    assert f"rank 2 on node2 has {here}, ranks 0-1 (on node0) {there}; " in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_fast_reductions_go_on_with_a_warning():
    notes = []
    same_bits.check_bits(hosts(MACHINE, MACHINE | {"threads": 2}), False, notes)
    (note,) = notes
    assert isinstance(note, log.Caution)
    assert "rank 1 on node1 has threads 2, rank 0 (on node0) threads 1" in note


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"processor": "B", "BLAS": "K 2", "code for": "b"}, None),
        ({"threads": 2}, "threads 1, now 2:"),
        ({"trial": "1", "threads": 2}, "threads 1, now 2:"),
        ({"trial": "1", "processor": "B", "BLAS": "K 2"}, "BLAS K 1, now K 2; processor A, now B:"),
        ({"trial": "1"}, "kernel"),
        ({"device": "a GPU"}, "device None, now a GPU:"),
    ],
    ids=str,
)
def test_what_changed_since_a_checkpoint_is_one_line(change, expected):
    lines = list(same_bits.changes(MACHINE, MACHINE | change))
    assert len(lines) == (expected is not None)
    assert not lines or expected in lines[0]


@pytest.fixture
def flags(tmp_path):
    return [*FLAGS, "--data", *write_text(tmp_path), "--out", str(tmp_path / "out")]


@needs_mpiexec
@several_cores
def test_another_number_of_threads_on_one_rank_is_refused(flags, tmp_path):
    one, two = (["env", f"OMP_NUM_THREADS={count}", *RUN, *flags] for count in (1, 2))
    host = platform.node()
    assert f"rank 1 on {host} has threads 2, ranks 0, 2 (on {host}) threads 1" in refused(one, two, tmp_path)


@needs_mpiexec
def test_a_processor_of_other_bits_on_one_rank_is_refused(flags, tmp_path):
    """The results of the trial decide, because OpenBLAS may use one kernel name for two processors."""
    script = tmp_path / "other.py"
    script.write_text(
        "import numpy as np\n"
        "from zero_mpi import ops\n"
        "from zero_mpi.train import description as samebits\n"
        "from zero_mpi.train import command as train_command\n"
        "gelu, samebits.processor = ops.gelu, lambda: 'Another 9000'\n"
        "ops.gelu = lambda x: np.nextafter(gelu(x), np.float32(9))\n"
        "train_command.main()\n"
    )
    message = refused([*RUN, *flags], [sys.executable, str(script), *flags], tmp_path)
    assert f"rank 1 on {platform.node()} has processor Another 9000, ranks 0, 2" in message
    assert "the ranks compute different bits" in message


@needs_mpiexec
@pytest.mark.parametrize("io", ["gather", "parallel"])
def test_names_that_differ_without_other_bits_leave_checkpoints_whole(io, flags, tmp_path):
    """A resume compares with rank 0's machine, which the checkpoint describes."""
    script = tmp_path / "other.py"
    script.write_text(
        "from zero_mpi.train import description as samebits\n"
        "from zero_mpi.train import command as train_command\n"
        "samebits.processor = lambda: 'Another 9000 with a long name'\n"
        "train_command.main()\n"
    )
    args = [*flags, "--checkpoint-io", io]
    command = [*launcher(), "-n", "1", *RUN, *args, ":", "-n", "1", sys.executable, str(script), *args]
    status, printed, errors = run_command(command, timeout=40, cwd=tmp_path)
    assert (status, errors) == (0, ""), f"{printed}\n{errors}"
    files = open_checkpoint(tmp_path / "out" / "latest")
    state = files.state
    check_digests(files, 0, 1)
    assert json.loads(state.metadata["training.machine"])["processor"] == same_bits.processor()


@needs_mpiexec
@x86
def test_a_resume_with_other_kernels_says_so_and_one_with_the_same_does_not(flags, tmp_path):
    out, args = tmp_path / "out", [*flags, "--schedule", "constant", "--save-every", "1"]
    train(1, out, *args, "--steps", "1")
    stored = GGUFFile.open(out / "latest" / "optimizer.gguf").metadata["training.machine"]
    assert set(MACHINE) <= set(json.loads(stored))
    assert "warning" not in train(2, out, *args, "--steps", "2")
    for mode in (["--dry-run"], []):
        printed = train(1, out, *args, *mode, "--steps", "3", operations=REFERENCE | KERNELS)
        assert "the checkpoint was made with BLAS openblas" in printed
    assert "warning: the checkpoint was made with BLAS openblas" in printed
    assert "Nehalem: " in printed
