"""`zero-mpi COMMAND ...`, which is the same as `python -m zero_mpi COMMAND ...`."""

import sys
from importlib.util import find_spec

from zero_mpi import environment
from zero_mpi.launch import stopping

COMMANDS = {
    "train": "train a model, sharded over MPI ranks",
    "tokenize": "convert text to token files, in parallel",
    "evaluate": "measure loss and perplexity on a text, or accuracy on questions",
    "verify": "recompute steps of a run and compare every bit with its records",
    "generate": "generate text from a GGUF model",
    "samples": "show conversations as training sees them, and the tokens in the loss",
    "inspect": "show and check a model file or checkpoint, or compare two",
    "export": "convert a model to F16, BF16, Q8_0, ... or safetensors",
    "supervise": "restart a run on the remaining hosts when a rank or host dies",
    "plan": "estimate memory, traffic and time of a run before it starts",
    "hostfile": "write a hostfile for MPICH or Open MPI",
    "doctor": "check hosts, MPI and limits before a job, and measure speed",
    "trace": "summarize where the time went, from a timeline of --trace",
    "report": "write curves and events of runs as one HTML page",
    "completion": "print a shell script that completes commands and flags",
}
EXAMPLES = """\
mpirun -n 8 zero-mpi train        train on 8 ranks, on Python's standard library
zero-mpi COMMAND --help           the flags of a command"""


def main() -> None:
    """Run the console script `zero-mpi`, or `python -m zero_mpi`."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        start(name)
        return
    from zero_mpi.cli.parser import nearest, version_lines  # slow import, which commands must not wait for
    from zero_mpi.files.foreign import show

    if environment.launch_rank() > 0:
        sys.exit(0 if name in ("--version", "-h", "--help") else 2)  # rank 0 prints for all
    if name == "--version":
        print("\n".join(version_lines()))
    elif name in ("-h", "--help"):
        print("usage: zero-mpi COMMAND [flags]\n\ncommands:")
        print("\n".join(f"  {command:10}  {text}" for command, text in COMMANDS.items()))
        print("\nexamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES.splitlines()))
    else:
        hint = nearest(name, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}"
        sys.stderr.write(f"zero-mpi: error: {show(name)} is not a command{hint}\n")
        sys.exit(2)


def start(name: str) -> None:
    stopping.start(name, module_of(name))


def module_of(name: str) -> str:
    """Return the name of the module that has the command's `main`."""
    if name == "train":
        return "zero_mpi.train.command"
    module = f"zero_mpi.commands.{name}"
    spec = find_spec(module)
    return f"{module}.command" if spec is not None and spec.submodule_search_locations else module
