"""`plan --machine FILE.toml`: the plan uses the file's figures or refuses the file in one line."""

import json
import tomllib
from copy import deepcopy
from pathlib import Path

import pytest
import tomli_w

from zero_mpi.commands.plan.command import command, read
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World
from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import ASSUMED, Level, Link, Machine, read_machine
from zero_mpi.plan.rank_memory import checkpoint_bytes
from zero_mpi.plan.step_time import step_time

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "machines"
LARGE = tomllib.loads((EXAMPLES / "large.toml").read_text())
SIZES = ["--layers", "1", "--dim", "16", "--heads", "2", "--context", "8", "--vocab-size", "300"]
SIZES += ["--strategy", "full-shard"]


def planned(folder, *flags, machine=EXAMPLES / "large.toml"):
    assert command(World(0, 1), [*SIZES, "--machine", str(machine), *flags, "--json", f"{folder}/p"]) == 0
    return json.loads((folder / "p").read_text())


def test_what_the_file_says_reaches_the_plan(tmp_path, capsys):
    plan = planned(tmp_path, "--ranks", "128", "--memory", "4M")
    machine = plan["machine"]
    assert plan["nodes"] == 2
    assert (machine["flops"], machine["moves"], machine["memory"]) == (
        100e9,
        8e9,
        4 << 20,
    )  # --memory overrides the file
    assert read_machine(EXAMPLES / "large.toml").numbers["memory"] == 15_625_000_000
    assert machine["node"] == {"alpha": 1e-6, "beta": 1e-10}
    assert [level["nodes"] for level in machine["levels"]] == [16, 128, None]
    printed = capsys.readouterr().out
    assert "network: leaf, up to 16 node(s): 2.0 us, 25 GB/s; group" in printed
    assert "assumed" not in printed


@pytest.mark.parametrize(
    ("flags", "flops"),
    [
        (["--precision", "fp32"], 100e9),
        (["--precision", "bf16"], 1e12),
        (["--precision", "fp16"], 100e9),  # CPUs compute fp16 in float32
        (["--precision", "fp16", "--device", "cuda"], 1e12),
        (["--precision", "fp32", "--device", "cuda"], 100e9),
    ],
)
def test_products_have_the_rate_of_their_type(flags, flops):
    assert read([*SIZES, "--machine", str(EXAMPLES / "large.toml"), *flags]).machine.flops == flops


def test_a_sweep_goes_to_16384_ranks_on_nodes_of_the_file_s_size(tmp_path):
    points = planned(tmp_path, "--sweep")["sweep"]["full-shard"]["points"]
    assert [(p["ranks"], p["nodes"]) for p in points[::2]] == [(4**n, max(1, 4**n // 64)) for n in range(8)]


GIVEN = (ASSUMED.node, ASSUMED.between, ASSUMED.flops, ASSUMED.moves)
LEVELS = (
    Level("a", 2, Link(1e-6, 1e-9)),
    Level("b", 8, Link(1e-5, 2e-9)),
    Level("c", None, Link(1e-4, 4e-9)),
)


@pytest.mark.parametrize(("nodes", "taken"), [(2, 0), (4, 1), (16, 2)])
def test_a_step_takes_the_time_of_its_level(nodes, taken, model):
    case = Case(model, ranks=16, nodes=nodes)
    of_level = Machine(ASSUMED.node, LEVELS[taken].link, *GIVEN[2:])
    assert step_time(case, Machine(*GIVEN, levels=LEVELS)) == step_time(case, of_level)


@pytest.fixture
def model():
    return read(SIZES).cases[0].model


def test_a_checkpoint_has_weights_moments_and_averages(model):
    count = sum(param.size for param in model.params().values())
    assert checkpoint_bytes(Case(model, ranks=8, nodes=4)) == 12 * count  # float32: a weight and two moments
    assert checkpoint_bytes(Case(model, ema=0.9)) == 16 * count  # and its average


REFUSED = {
    "unknown table": (lambda m: m.update(nodes={}), "'nodes' is not a key; did you mean node?"),
    "unknown key": (lambda m: m["rates"].update(flops=1), "[rates]: 'flops'"),
    "no table": (lambda m: m.pop("rates"), "[rates]: expected a table"),
    "no key": (lambda m: m["node"].pop("ranks"), "[node]: ranks: "),
    "half": (lambda m: m["node"].update(ranks=1.5), "found 1.5"),
    "zero": (lambda m: m["node"].update(bytes_per_second=0), "[node]: bytes_per_second: "),
    "order": (lambda m: m["network"][1].update(nodes=16), "[[network]] 2: nodes is 16: "),
    "inner": (lambda m: m["network"][0].pop("nodes"), "[[network]] 1: nodes: "),
    "outermost": (lambda m: m["network"][2].update(nodes=999), "[[network]] 3: nodes: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(name, tmp_path):
    change, message = REFUSED[name]
    machine = deepcopy(LARGE)
    change(machine)
    (tmp_path / "m.toml").write_text(tomli_w.dumps(machine))
    with pytest.raises(UsageError) as raised:
        read_machine(tmp_path / "m.toml")
    assert str(raised.value).startswith(f"--machine {tmp_path}/m.toml: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_would_say_it_twice_is_refused():
    with pytest.raises(UsageError, match=r"--doctor d\.json.*--machine"):
        command(World(0, 1), ["--doctor", "d.json", "--machine", str(EXAMPLES / "small.toml")])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_taken(path):
    assert read_machine(path).levels
