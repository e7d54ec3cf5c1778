"""`zero-mpi COMMAND ...`: the same as `python -m zero_mpi COMMAND ...`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from zero_mpi import environment
from zero_mpi.launch import stopping

COMMANDS = {
    "train": "train a model, sharded over MPI ranks",
    "tokenize": "text into token files, in parallel, with an index of documents",
    "evaluate": "loss and perplexity of a text, right answers to questions",
    "verify": "whether a run is what its folder says, by computing it again",
    "generate": "text from a GGUF model",
    "samples": "conversations as training reads them, and which of their tokens count",
    "inspect": "what a model file or checkpoint holds, and whether it is sound",
    "export": "a model as F16, BF16, Q8_0, ... or safetensors",
    "supervise": "starts a run again where a rank or a host was lost, on the hosts that are left",
    "plan": "memory, traffic and time of a run, before it is started",
    "hostfile": "a hostfile in the form that MPICH or Open MPI reads",
    "doctor": "whether a job would run well on these hosts, and what to do where not",
    "trace": "where the time of each rank went, from a time line of --trace",
    "report": "curves and figures of runs as one page for a browser, or in the terminal",
    "completion": "a script that completes commands and flags in your shell",
}
EXAMPLES = """\
mpirun -n 8 zero-mpi train        train on 8 ranks, here on Python's own library
zero-mpi COMMAND --help           the flags of a command"""


def main() -> None:
    """Run the console script, and `python -m zero_mpi`."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        start(name)
        return
    from zero_mpi.cli.parser import nearest, version_lines  # slow; a command hears signals first
    from zero_mpi.files.foreign import show

    if environment.launch_rank() > 0:
        sys.exit(0 if name in ("--version", "-h", "--help") else 2)  # rank 0 speaks for all
    if name == "--version":
        print("\n".join(version_lines()))
    elif name in ("-h", "--help"):
        print("usage: zero-mpi COMMAND [flags]\n\ncommands:")
        print("\n".join(f"  {command:10}  {text}" for command, text in COMMANDS.items()))
        print("\nexamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES.splitlines()))
    else:
        meant = nearest(name, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}"
        sys.stderr.write(f"zero-mpi: error: {show(name)} is not a command{meant}\n")
        sys.exit(2)


def start(name: str) -> None:
    """Run a command with the arguments in sys.argv behind its name."""
    stopping.start(name, module_of(name))


def module_of(name: str) -> str:
    """Return the module of a command that has its `main`."""
    if name == "train":
        return "zero_mpi.train.command"
    place = f"zero_mpi.commands.{name}"
    spec = find_spec(place)
    return f"{place}.command" if spec is not None and spec.submodule_search_locations else place
