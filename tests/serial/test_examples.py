"""The programs of README and examples/ run, and all names in docs/api.md exist."""

import functools
import inspect
import re
import sys
from pathlib import Path

import pytest
from jobs import TIMED_OUT, run_command, run_job
from test_command_bits import needs_mpiexec

import zero_mpi
from zero_mpi.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
OF_SMOLLM2 = ("finetune_smollm2", "preferences")  # test_finetune.py runs these
SHORT = [name for name in EXAMPLES if name not in OF_SMOLLM2]
# Examples whose micro-batches do not depend on the ranks.
EXACT = ("custom_loop", "custom_model", "lion", "mlp_digits", "save_and_load")
NAMED = re.compile(r"(?P<owner>\w+)(?:\.(?P<member>\w+))?(?:\((?P<arguments>.*)\))?")


def run_script(path: Path, ranks: int, folder: Path) -> str:
    status, printed, errors = run_job(ranks, [path], timeout=50, cwd=folder)
    assert (status, errors) == (0, ""), f"status {status}\n{printed}\n{errors}"
    return printed


def losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"\bloss (\S+)", printed)]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Return printed(name, ranks), the output of an example; each example is run once."""

    @functools.cache
    def run(name: str, ranks: int) -> str:
        folder = tmp_path_factory.mktemp(f"{name}-{ranks}")
        return run_script(ROOT / "examples" / f"{name}.py", ranks, folder)

    return run


@needs_mpiexec
@pytest.mark.parametrize("name", SHORT)
def test_example_lowers_its_loss(name, printed):
    curve = losses(printed(name, 3))
    assert len(curve) >= 10
    assert curve[-1] < curve[0] / 2


@needs_mpiexec
@pytest.mark.parametrize("name", EXACT)
def test_example_prints_the_same_at_any_number_of_ranks(name, printed):
    assert printed(name, 1) == printed(name, 3)


@needs_mpiexec
def test_each_half_of_a_run_may_have_its_own_number_of_ranks(printed, tmp_path):
    path, halves = ROOT / "examples" / "save_and_load.py", ""
    for ranks in (3, 2):
        status, output, errors = run_job(ranks, [path, "halfway"], timeout=50, cwd=tmp_path)
        assert (status, errors) == (0, "")
        halves += output
    assert halves == printed("save_and_load", 1)


@pytest.fixture(scope="module")
def in_a_notebook():
    """Return name -> output of each example, run without launcher and MPI library."""
    code = (
        "import importlib, sys; sys.modules['mpi4py.MPI'] = None\n"
        f"sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        "from zero_mpi.launch.world import World\n"
        f"for name in {SHORT}:\n"
        "    assert importlib.import_module(name).command(World(0, 1), []) == 0\n"
        "    print('\\f', end='')"
    )
    status, output, errors = run_command([sys.executable, "-c", code], timeout=60)
    assert (status, errors) == (0, "")
    return dict(zip(SHORT, output.split("\f"), strict=False))


@needs_mpiexec
@pytest.mark.parametrize("name", SHORT)
def test_example_works_without_any_mpi_as_in_a_notebook(name, printed, in_a_notebook):
    assert in_a_notebook[name] == printed(name, 1)


@pytest.mark.parametrize(("variables", "threads"), [({}, {1}), ({"OMP_NUM_THREADS": "2"}, {2})])
def test_a_rank_has_one_thread_though_numpy_was_imported_first(variables, threads):
    """One thread is the default even after NumPy's import; more threads would make ranks ten times slower."""
    code = (
        "import numpy; from zero_mpi import connect; comm = connect(); import threadpoolctl\n"
        "print({pool['num_threads'] for pool in threadpoolctl.threadpool_info()}, comm.size)"
    )
    result = run_command([sys.executable, "-c", code], timeout=30, env=variables)
    assert result == (0, f"{threads} 1\n", "")


@needs_mpiexec
@pytest.mark.parametrize("times", [1, 2])
def test_an_error_on_one_rank_ends_a_script_on_all(times):
    code = (
        "from zero_mpi import connect\n"
        f"for _ in range({times}): comm = connect()\n"
        "if comm.rank == 1: raise ValueError('only here')\n"
        "comm.sum_vector(__import__('numpy').zeros(1))\n"
    )
    status, _, errors = run_job(3, ["-c", code], timeout=30)
    assert status not in (0, TIMED_OUT)
    assert errors.count("ValueError: only here\n") == 1
    assert errors.count("zero_mpi: rank 1 of 3 failed with the error above; ending the job\n") == 1


def test_under_a_launcher_without_mpi_nobody_trains_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "zero_mpi.comm.start_mpi", raising=False)  # loaded by other tests
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(UsageError, match=r"no MPI library .* pip install 'zero-mpi\[mpich\]'"):
        zero_mpi.connect()


@needs_mpiexec
def test_held_out_digits_are_read_and_the_custom_model_counts_on(printed):
    assert float(re.search(r"accuracy (\S+)", printed("mlp_digits", 1))[1]) > 0.95
    assert printed("custom_model", 1).splitlines()[-1] == "3 6 goes on: 9 12 15 18 21 24"


@needs_mpiexec
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_python_runs_and_prints_once(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(block)
    lines = [line.split() for line in run_script(script, 2, tmp_path).splitlines()]
    assert [int(step) for step, _ in lines] == list(range(1, 21))
    assert float(lines[-1][1]) < float(lines[0][1]) - 0.5


def api_rows() -> list[str]:
    rows = API.partition("| Name |")[2].partition("\n\n")[0].splitlines()[2:]
    return [row.split("|")[1].strip().strip("`") for row in rows]


@pytest.mark.parametrize("entry", api_rows())
def test_names_in_the_api_table_exist(entry):
    match = NAMED.fullmatch(entry)
    assert match, entry
    member = getattr(zero_mpi, match["owner"])
    if any(
        match["member"] in vars(kind).get("__annotations__", ()) for kind in getattr(member, "__mro__", ())
    ):
        assert match["arguments"] is None
        return
    if match["member"]:
        member = inspect.getattr_static(member, match["member"])
    assert isinstance(member, property) == (match["arguments"] is None)
    if match["arguments"]:
        names = [argument.partition("=")[0].strip() for argument in match["arguments"].split(",")]
        assert [name for name in names if name not in inspect.signature(member).parameters] == []
