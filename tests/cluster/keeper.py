"""Helper that starts hosts or Slurm by a script of tools/cluster and always ends them.

They end with the block or if this process is killed: a separate shell waits for the end of its
standard input and then ends them.
"""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "cluster"
KEEPER = """
trap : PIPE HUP INT TERM
tool=$1; shift
state=${!#}
if "${tool}_up.sh" "$@" 2>&1; then echo up; else echo failed; fi
read -r _
"${tool}_down.sh" "$state"
rm -rf "$state"
"""


@contextlib.contextmanager
def kept(what: str, *arguments: str, env: Mapping[str, str]) -> Iterator[Path]:
    """Run `WHAT_up.sh ARGUMENTS... STATE`; return its state folder with an empty folder `runs`.

    Raise RuntimeError with the output of the script if the start failed.
    """
    state = Path(tempfile.mkdtemp(prefix=f"zero_mpi-{what}-", dir="/var/tmp"))
    (state / "runs").mkdir()
    keeper = subprocess.Popen(
        ["bash", "-c", KEEPER, "keeper", str(TOOLS / what), *arguments, str(state)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        if error := until_up(keeper, what):
            raise RuntimeError(f"no {what}: {error}")
        yield state
    finally:
        keeper.communicate()  # closes the script's input and waits


def until_up(keeper: subprocess.Popen[str], name: str) -> str:
    """Wait until the script reports that it is up; return its output if it failed."""
    lines: list[str] = []
    for line in keeper.stdout or ():
        if line == "up\n":
            return ""
        if line == "failed\n":
            break
        lines.append(line.strip())
    return "; ".join(lines) or f"{name}_up.sh failed and said nothing"
