"""What README and examples show runs, and what README names is there."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from jobs import run_job
from test_command_bits import needs_mpiexec

import zero_mpi
from zero_mpi import config, export, generate, hostfile
from zero_mpi import inspect as inspect_command
from zero_mpi.doctor import command as doctor
from zero_mpi.plan import options as plan_options

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"(?P<owner>\w+)(?:\.(?P<member>\w+))?(?:\((?P<arguments>.*)\))?")


def run_script(path: Path, ranks: int, folder: Path) -> str:
    """What a script prints, on success and silence on stderr only."""
    status, printed, errors = run_job(ranks, [path], timeout=50, cwd=folder)
    assert (status, errors) == (0, ""), f"status {status}\n{printed}\n{errors}"
    return printed


def losses(printed: str) -> list[float]:
    """The numbers behind "loss", in order."""
    return [float(number) for number in re.findall(r"\bloss (\S+)", printed)]


@needs_mpiexec
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if name != "finetune_smollm2"]
)  # test_finetune.py
def test_example_lowers_its_loss(name, ranks, tmp_path):
    found = losses(run_script(ROOT / "examples" / f"{name}.py", ranks, tmp_path))
    assert len(found) >= 10
    assert found[-1] < found[0] / 2


@needs_mpiexec
def test_custom_loop_prints_the_same_at_any_number_of_ranks(tmp_path):
    one, three = (run_script(ROOT / "examples" / "custom_loop.py", ranks, tmp_path) for ranks in (1, 3))
    assert one == three


def test_sharded_linear_has_uneven_rows():
    assert "sharded_linear" in EXAMPLES
    assert zero_mpi.Partition(10, 3).counts == (4, 3, 3)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_says_how_to_run_it(name):
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert re.search(rf"^    mpirun -n \d+ python examples/{name}\.py$", text, re.MULTILINE)


def test_readme_has_python():
    assert BLOCKS


@needs_mpiexec
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_python_runs_and_prints_once(block, tmp_path):
    """Step and loss, from one rank of the two, and the loss falls."""
    script = tmp_path / "block.py"
    script.write_text(block)
    lines = [line.split() for line in run_script(script, 2, tmp_path).splitlines()]
    assert [int(step) for step, _ in lines] == list(range(1, 21))
    assert float(lines[-1][1]) < float(lines[0][1]) - 0.5


def test_flags_in_readme_exist():
    own = {config.spelled(name) for name in config.FIELDS} | {"--config", "--help"}
    for command in (generate, export, inspect_command, doctor, plan_options, hostfile):
        own |= set(command.make_parser().format_help().replace("[", " ").replace("]", " ").split())
    own |= {"--with-mpi", "--shm-size"}  # of pytest-mpi, of docker
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README))
    assert len(named) > 10
    assert named - own == set()


def test_strategies_in_readme_are_those_of_the_flag():
    table = README.partition("| `--strategy` |")[2].partition("\n\n")[0]
    assert (
        tuple(re.findall(r"^\| `([a-z-]+)`", table, re.MULTILINE))
        == (config.FIELDS["strategy"].metadata["choices"])
    )


def api_rows() -> list[str]:
    """The second column of the API table, without its quotes."""
    rows = README.partition("| There | Here |")[2].partition("\n\n")[0].splitlines()[2:]
    return [row.split("|")[2].strip().strip("`") for row in rows]


@pytest.mark.parametrize("entry", api_rows())
def test_names_in_the_api_table_exist(entry):
    match = NAMED.fullmatch(entry)
    assert match, entry
    found = getattr(zero_mpi, match["owner"])
    if match["member"]:
        found = inspect.getattr_static(found, match["member"])
    assert isinstance(found, property) == (match["arguments"] is None)
    if match["arguments"]:
        wanted = [argument.partition("=")[0].strip() for argument in match["arguments"].split(",")]
        assert [name for name in wanted if name not in inspect.signature(found).parameters] == []


def test_shard_info_in_readme_has_the_fields_of_the_class():
    fields = ", ".join(field.name for field in dataclasses.fields(zero_mpi.ShardInfo))
    assert f"`ShardInfo({fields})`" in README


def test_what_a_class_calls_public_is_mentioned():
    """Every name of the API that the table is there for has a row."""
    entries = " ".join(api_rows())
    for name in ("ShardedModule", "ShardedLinear", "GradAccum", "ShardedAdamW", "DDP", "clip_grad_norm"):
        assert name in entries
