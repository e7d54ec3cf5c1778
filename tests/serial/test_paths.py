"""Every command ends with one line and status 2 if the system refuses a path for any reason."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import clean_environment
from test_command_bits import needs_mpiexec, train, write_text

OBEDIENT = Path(__file__).with_name("obedient.py")
PLACES = {  # problem -> path in the folder that the fixture `places` makes
    "locked folder": "locked/in",
    "locked": "secret",
    "a locked folder": "locked",
    "name too long": "x" * 300,
    "path too long": "a/" * 2500 + "a",
    "loop": "loop",
    "below a loop": "loop/in",
    "below a file": "text/in",
    "empty": "",
}
SMALL = ["--layers", "1", "--dim", "8", "--heads", "2", "--context", "8", "--steps", "1", "--sample", "0"]
TRAIN = ["zero_mpi.train", *SMALL, "--data", "text", "--out", "out"]
SAMPLES = ["zero_mpi", "samples", "model.gguf", "--data", "chat.jsonl"]
READ = {  # commands that read PATH
    "train --data": [*TRAIN, "--data", "PATH"],
    "train --data, two": [*TRAIN, "--data", "text", "PATH"],
    "train --init": [*TRAIN, "--init", "PATH"],
    "train --tokenizer": [*TRAIN, "--tokenizer", "PATH"],
    "train --resume": [*TRAIN, "--resume", "PATH"],
    "train --config": [*TRAIN, "--config", "PATH"],
    "train --dry-run --data": [*TRAIN, "--dry-run", "--data", "PATH"],
    "plan --init": ["zero_mpi", "plan", "--init", "PATH"],
    "plan --config": ["zero_mpi", "plan", "--config", "PATH"],
    "plan --doctor": ["zero_mpi", "plan", "--doctor", "PATH"],
    "plan --machine": ["zero_mpi", "plan", "--machine", "PATH"],
    "plan --tokenizer": ["zero_mpi", "plan", "--tokenizer", "PATH"],
    "generate": ["zero_mpi", "generate", "PATH"],
    "samples": ["zero_mpi", "samples", "PATH", "--data", "chat.jsonl"],
    "samples --data": ["zero_mpi", "samples", "model.gguf", "--data", "PATH"],
    "samples --chat-template": [*SAMPLES, "--chat-template", "PATH"],
    "inspect": ["zero_mpi", "inspect", "PATH"],
    "export": ["zero_mpi", "export", "PATH", "new.gguf"],
    "report": ["zero_mpi", "report", "PATH"],
    "trace": ["zero_mpi", "trace", "PATH"],
    "hostfile": ["zero_mpi", "hostfile", "PATH", "--for", "mpich"],
    "supervise --hostfile": ["zero_mpi", "supervise", "--hostfile", "PATH", "--", "mpirun"],
}
WRITE = {
    "train --out": [*TRAIN, "--out", "PATH"],
    "train --dry-run --out": [*TRAIN, "--dry-run", "--out", "PATH"],
    "train --trace": [*TRAIN, "--trace", "PATH"],
    "plan --json": ["zero_mpi", "plan", *SMALL, "--json", "PATH"],
    "doctor --json": ["zero_mpi", "doctor", "--quick", "--json", "PATH"],
    "report --out": ["zero_mpi", "report", "run", "--out", "PATH"],
    "export to": ["zero_mpi", "export", "model.gguf", "PATH", "--format", "gguf"],
    "export to a folder": ["zero_mpi", "export", "model.gguf", "PATH", "--format", "safetensors"],
}


REPLACED = {"report --out: locked"}  # a rename can replace a page that has no write permission


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    Path(write_text(folder, documents=1)[0]).rename(folder / "text")
    train(1, folder / "run", "--data", str(folder / "text"), *SMALL, "--batch-size", "1")
    shutil.copy(folder / "run" / "latest" / "model.gguf", folder)
    (folder / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    (folder / "loop").symlink_to("loop")
    (folder / "secret").write_text("text " * 99)
    (folder / "locked").mkdir()
    for name in ("secret", "locked"):
        (folder / name).chmod(0)
    yield folder
    (folder / "locked").chmod(0o700)


def cases_of(commands, apart=1):
    """Return each command's arguments for every path, or for every `apart`-th path in turn."""
    return {
        f"{name}: {label}": [place if word == "PATH" else word for word in command]
        for number, (name, command) in enumerate(commands.items())
        for turn, (label, place) in enumerate(PLACES.items(), number)
        if turn % apart == 0 and f"{name}: {label}" not in REPLACED
    }


def run_all(cases, folder):
    opts = {"capture_output": True, "text": True, "cwd": folder, "env": clean_environment(), "timeout": 300}
    done = subprocess.run([sys.executable, OBEDIENT], input=json.dumps(cases), **opts)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_mpiexec
@pytest.mark.timeout_seconds(180)
@pytest.mark.parametrize("commands", [READ, WRITE], ids=["read", "write"])
def test_one_line_and_status_2_wherever_the_system_says_no(commands, places, quick):
    results = run_all(cases_of(commands, apart=3 if quick else 1), places)
    wrong = {
        name: result
        for name, result in results.items()
        if result[:2] != [2, ""] or not re.fullmatch(r"zero_mpi \w+: error: [^\n]{20,400}\n", result[2])
    }
    assert wrong == {}
