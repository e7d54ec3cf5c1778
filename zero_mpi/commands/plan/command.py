"""`zero-mpi plan`: prints the plan for a run with the given flags. `--json` writes it to a file."""

import argparse
import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi.checkpoint.mixes import FILE_TYPES, MIXES, types_of
from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import write
from zero_mpi.config import inputs
from zero_mpi.config.bounds import check, within
from zero_mpi.config.command_line import joined, split_flags
from zero_mpi.config.command_line import make_parser as train_parser
from zero_mpi.config.inputs import settled
from zero_mpi.config.settings import FIELDS, Config, spelled
from zero_mpi.config.toml import read_toml
from zero_mpi.errors import UsageError
from zero_mpi.files.atomic import write_json
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import check_target
from zero_mpi.launch.world import World
from zero_mpi.launch.world import run as launch
from zero_mpi.models import ModelConfig
from zero_mpi.ops.block_kinds import BLOCK_KINDS
from zero_mpi.plan import machine as machines
from zero_mpi.plan.case import Case, check_sums, make_case
from zero_mpi.plan.machine import LOW, Machine, MachineFile, assumed, machine_of
from zero_mpi.plan.plan import MOST_RANKS, make_plan, sweep
from zero_mpi.plan.rank_memory import resident, text_bytes
from zero_mpi.plan.report import ask_lines, head, introduction, report, sweep_lines
from zero_mpi.sharding.strategy import STRATEGIES

SHOWN_GROUPS = ("model", "batch", "sharding")
SHOWN = {  # flags of `train` that `plan --help` shows
    *("--async-save", "--tokenizer", "--config", "--help", "--device", "--precision", "--reduce-dtype"),
    *("--offload", "--version", "--lora", "--lora-targets"),
    *("--loss", "--teacher"),
}
EXAMPLES = """\
Examples:

  zero-mpi plan --layers 32 --dim 2048 --heads 16 --ranks 64
  zero-mpi plan --init MODEL.gguf --ranks 16 --nodes 4 --memory 64G"""
SWEEP = ("ranks_per_node", "most_ranks")


class Question(NamedTuple):
    """Cases to plan. `per_node` is a sweep's number of ranks per node; `text`: bytes of all token ids."""

    cases: tuple[Case, ...]
    machine: Machine
    numbers: tuple[str, ...]  # names of the machine's numbers that are measured or given
    per_node: int
    most_ranks: int
    sweeps: bool
    json: Path | None
    text: int = 0
    sample: bool = False


def make_parser() -> Parser:
    """Return a parser with plan's flags and train's flags. Flags without effect are accepted but hidden."""
    parser = train_parser()
    parser.prog, parser.epilog = "zero-mpi plan", EXAMPLES
    parser.description = (
        "Estimate what a run will need: memory per rank, traffic and time per step. It takes the flags of "
        "zero_mpi.train; without --strategy it compares all strategies. It runs in one process, without "
        "mpirun or a GPU; --device auto means the CPU."
    )
    for group in parser._action_groups:
        for action in group._group_actions:
            if group.title not in SHOWN_GROUPS and not SHOWN & set(action.option_strings):
                action.help = argparse.SUPPRESS
    add = parser.add_argument_group("plan").add_argument
    add("--ranks", type=int, metavar="N", help="number of MPI ranks (default: 1)")
    add("--nodes", type=int, metavar="M", help="nodes (default: 1, or from --machine)")
    add("--base", choices=(*FILE_TYPES, *MIXES), help="type of the frozen base for --lora, without --init")
    add("--memory", metavar="SIZE", help="memory per rank, e.g. 64G: print the largest micro-batch that fits")
    add("--doctor", metavar="FILE", help="speeds measured by zero-mpi doctor --json")
    add("--machine", metavar="FILE", help="TOML description of another machine")
    add("--sweep", action="store_true", help="plan 1, 2, 4, ... ranks")
    add("--ranks-per-node", type=int, metavar="N", help="ranks per node in the sweep (default: as planned)")
    add("--most-ranks", type=int, metavar="N", help=f"maximum ranks (default: {MOST_RANKS})")
    add("--json", metavar="FILE", help="write the estimates to FILE too")
    return parser


def read(arguments: Sequence[str]) -> Question:
    """Return the cases that a command line describes. Raise UsageError for invalid flags."""
    flags, options = split_flags(make_parser(), arguments, ("config", *FIELDS))
    path = flags.pop("config", None)
    settings = joined(read_toml(Path(path), []) if path else {}, flags)
    config = Config(**settings)
    check(config)
    for name in SWEEP:
        if name in options and "sweep" not in options:
            raise UsageError(f"{spelled(name)} {options[name]}: needs a sweep: add --sweep")
    machine_file, ranks, nodes = find_places(options)
    model = find_model(config, options.get("base"))
    config = inputs.shortened(config, model)
    names = [config.strategy] if "strategy" in settings else list(STRATEGIES)
    if "strategy" not in settings and config.device == "cuda" and nodes > 1:
        names.remove("hybrid-shard")
    cases = tuple(make_case(replace(config, strategy=name), model, ranks, nodes) for name in names)
    for case in cases:
        check_sums(case)
    machine, known = find_machine(options, machine_file, cases[0])
    node_ranks = ranks // nodes if machine_file is None else machine_file.ranks
    text = 0
    with contextlib.suppress(UsageError, OSError):  # the data may not be on this machine
        text = text_bytes(config, model)
    return Question(
        cases,
        machine,
        known,
        per_node=within("ranks_per_node", options.get("ranks_per_node", node_ranks), 1),
        most_ranks=within("most_ranks", options.get("most_ranks", MOST_RANKS), 1),
        sweeps="sweep" in options,
        json=Path(options["json"]) if "json" in options else None,
        text=text,
        sample=config.sample > 0,
    )


def find_places(options: dict[str, Any]) -> tuple[MachineFile | None, int, int]:
    """Return the machine file, ranks and nodes. The default is as few nodes as the ranks need."""
    machine_file = None
    if "machine" in options:
        if "doctor" in options:
            raise UsageError(f"--doctor {shown(options['doctor'])}: also set by --machine: use one of them")
        machine_file = machines.read_machine(Path(options["machine"]))
    ranks = within("ranks", options.get("ranks", 1), 1)
    nodes = within("nodes", options.get("nodes", -(-ranks // machine_file.ranks) if machine_file else 1), 1)
    if ranks % nodes:
        raise UsageError(
            f"--nodes {nodes} does not divide --ranks {ranks}: expected the same number of ranks on each node"
        )
    return machine_file, ranks, nodes


def find_model(config: Config, base: str | None = None) -> ModelConfig:
    """Return the model configuration of `--init` or the flags. vocab_size defaults to the tokenizer's.

    Without `--init`, a frozen base has the types that `export --type` would write for the type `base`.
    """
    init = inputs.open_init(config)
    if init is not None and base is not None:
        raise UsageError(f"--base {base}: --init already has a type: leave one of them out")
    if init is not None:
        model = inputs.adapted(config, inputs.read_model(init), init, config.device)
        settled(config, model)  # raises UsageError if a flag contradicts the model
    else:
        tokenizer = None if config.vocab_size is not None else inputs.open_tokenizer(config, None, None)
        model = replace(inputs.model_from_flags(config, tokenizer), lora=config.adapters)
    if base is not None:
        if model.lora is None:
            raise UsageError(f"--base {base}: needs an adapter: add --lora RANK")
        if config.device == "cuda":
            raise UsageError(f"--base {base}: a GPU keeps the base as floats: leave it out")
        shapes = {name: param.shape for name, param in replace(model, lora=None).params().items()}
        kinds = types_of({"general.architecture": model.arch} | model.metadata(), shapes, base)
        stored = tuple((name, BLOCK_KINDS[kind.name]) for name, kind in kinds.items())
        model = replace(model, lora=replace(model.lora, stored=stored))
    inputs.check_model(inputs.shortened(config, model), model)
    return model


def find_machine(
    options: dict[str, Any], machine_file: MachineFile | None, case: Case
) -> tuple[Machine, tuple[str, ...]]:
    """Return the machine's numbers, and the names of the numbers that are measured or given."""
    numbers = machines.read_doctor(Path(options["doctor"])) if "doctor" in options else {}
    if machine_file is not None:
        numbers = dict(machine_file.numbers)
    bf16_flops = numbers.pop("bf16_flops", 0.0)
    base = assumed(case.on_gpu, case.precision_name)
    if bf16_flops and base in LOW:
        numbers["flops"] = bf16_flops
    if case.on_gpu and machine_file is None:  # the doctor has measured the host's CPU
        numbers = {name: value for name, value in numbers.items() if name not in ("flops", "memory")}
    if (text := options.get("memory")) is not None:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
        size = float(match[1]) * 2.0 ** (10 * " KMGT".index(match[2].upper() or " ")) if match else 0.0
        if not 0 < size < math.inf:
            raise UsageError(f"--memory {text}: expected a size such as 64G, 512M or a number of bytes")
        numbers["memory"] = size
    machine = machine_of(numbers, base)
    if machine_file is not None:
        machine = replace(machine, levels=machine_file.levels)
    return machine, tuple(numbers)


def command(world: World, arguments: Sequence[str]) -> int:
    """Print the plans. Return the exit status."""
    try:
        question = read(arguments)
        if question.json is not None:
            check_target("--json", question.json)
        numbers = sweeps(question) if question.sweeps else plans(question)
    except MemoryError as error:  # address space is reserved, although it is never used
        raise UsageError("a single unit of this model is larger than the memory of this machine") from error
    if question.json is not None:
        write_json("--json", question.json, numbers | {"machine": asdict(question.machine)})
    return 0


def plans(question: Question) -> dict[str, Any]:
    """Print the plan of each case. Return the numbers of all plans."""
    estimates = [make_plan(case, question.machine) for case in question.cases]
    nodes = [resident(plan.case, plan.memory, question.text, question.sample) for plan in estimates]
    tables = [
        plan.as_json() | {"node": asdict(node) | {"total": node.total, "ask": node.ask}}
        for plan, node in zip(estimates, nodes, strict=True)
    ]
    title = head("host memory per node", estimates)
    write([*report(estimates, question.machine, question.numbers), "", title, *ask_lines(nodes)])
    return {"ranks": estimates[0].case.ranks, "nodes": estimates[0].case.nodes, "plans": tables}


def sweeps(question: Question) -> dict[str, Any]:
    """Print the sweep of each case as soon as it is ready. Return the numbers of all sweeps."""
    write(introduction(question.cases[0], question.machine, question.numbers))
    numbers: dict[str, Any] = {}
    for case in question.cases:
        points = sweep(case, question.machine, question.per_node, question.most_ranks)
        write(["", *sweep_lines(case, points)])
        numbers[case.strategy_name] = {"points": [asdict(point) for point in points]}
    return {"ranks_per_node": question.per_node, "sweep": numbers}


main = partial(launch, "plan", command, alone=True, instead="start it without mpirun, with --ranks N")
