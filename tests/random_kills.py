"""Program that kills one run repeatedly at random moments: a rank, its launcher, or the full job.

    python tests/random_kills.py --count 100 --seed 1 --out FOLDER --data TEXT

Kills happen during the start of MPI, steps and saves. After each kill no process of the job may be left and
complete checkpoints must be sound. At the end one more start gives the same bytes as an unbroken run, and
/dev/shm has no more segments than after the first kill. Other jobs on the machine create files there too, so
use a private one: unshare -m sh -c 'mount -t tmpfs tmpfs /dev/shm; exec "$@"' sh python ...
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from jobs import RANK_VARIABLES, clean_environment, launcher, until

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.sound import check_digests, open_checkpoint
from zero_mpi.launch.dev_shm import PLACE, SEGMENTS

MODEL = ["--layers", "2", "--dim", "96", "--heads", "3", "--ffn", "97", "--context", "32", "--warmup", "2"]
MODEL += ["--batch-size", "12", "--micro-batch", "2", "--sample", "0", "--schedule", "constant"]
MODEL += ["--keep", "2", "--timeout", "60"]
VICTIMS = ("rank", "launcher", "job")
BY_ALL = ["--checkpoint-io", "parallel"]
WAYS = (["--async-save"], BY_ALL, ["--async-save", *BY_ALL], [*BY_ALL, "--strategy", "no-shard"], [])
MARK = "ZERO_MPI_TRIAL"  # environment variable of all processes of a trial
PATIENCE = 120.0  # seconds for an expected event on a busy machine


def variables_of(process):
    """Return the environment of a process; {} if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(line.partition("=")[::2] for line in lines)


def rank_in(variables):
    return int(next((variables[name] for name in RANK_VARIABLES if name in variables), -1))


def processes(mark):
    variables = {int(folder.name): variables_of(folder.name) for folder in Path("/proc").glob("[0-9]*")}
    return {process: rank_in(environ) for process, environ in variables.items() if environ.get(MARK) == mark}


def descendants(root):
    """Return the descendants of a process, found by the parents in /proc."""
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # the process has ended in the meantime
            children.setdefault(parent, []).append(int(entry.name))
    pids, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        pids += below
        waiting += below
    return pids


def ranks_of(job):
    """Return rank -> process of a job that this test started."""
    ranks = {rank_in(variables_of(process)): process for process in descendants(job.pid)}
    return {rank: process for rank, process in ranks.items() if rank >= 0}


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def newest(out):
    with contextlib.suppress(OSError):
        return int(os.readlink(out / "latest").removeprefix("step-"))
    return 0


def segments():
    return sum(len(list(PLACE.glob(pattern))) for pattern in SEGMENTS)


def sound_step(folder):
    files = open_checkpoint(folder)
    check_digests(files)
    return int(files.state.metadata["training.iteration_count"])


def trial(out, flags, draw):
    before, victim, mark = newest(out), draw.choice(VICTIMS), uuid.uuid4().hex
    command = [*launcher(), "-n", str(draw.choice([2, 3])), sys.executable, "-m", "zero_mpi.train", *flags]
    command += [*draw.choice(WAYS), "--steps", "100000", "--save-every", "1"]
    log = out.parent / "log"
    with log.open("wb") as file:
        job = subprocess.Popen(
            command, env=clean_environment() | {MARK: mark}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        if draw.random() < 0.3:  # kill at any moment of the start
            time.sleep(draw.random())
        else:
            until(lambda: newest(out) > before or job.poll() is not None, "a checkpoint", PATIENCE)
            time.sleep(draw.random() * 0.2)
        assert job.poll() is None, log.read_text()
        complete, pids = newest(out), processes(mark)
        ranks = sorted(pid for pid, rank in pids.items() if rank >= 0)
        if victim == "rank" and ranks:
            kill(draw.choice(ranks))
        elif victim == "job":
            os.kill(job.pid, signal.SIGSTOP)  # otherwise the launcher would clean up after its ranks
            for pid in pids:
                kill(pid)
        if victim == "launcher" or not ranks:
            kill(job.pid)
        until(lambda: job.poll() is not None, f"the launcher's end after a kill of a {victim}", PATIENCE)
        assert job.returncode not in (0, 2, 75), log.read_text()
        until(lambda: not processes(mark), f"the ranks' end after a kill of a {victim}", PATIENCE)
    finally:
        for pid in [job.pid, *processes(mark)]:
            kill(pid)
        job.wait()
    assert "unusable checkpoint" not in log.read_text()
    best = folders.candidates(out)
    assert not complete or sound_step(best[0]) >= complete >= before
    return victim


def bytes_of(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows], (
        out / "latest" / "model.gguf"
    ).read_bytes()


def run(folder, data, count, seed):
    out, draw, left = folder / "out", random.Random(seed), list[int]()
    flags = ["--out", str(out), "--data", *data, *MODEL]
    for number in range(count):
        victim = trial(out, flags, draw)
        left.append(segments())
        print(f"{number + 1:3} {victim:8} step {newest(out):5}, {left[-1]} segments", flush=True)
    time.sleep(2.5)  # a start does not remove files newer than 2 s
    last = ["--steps", str(newest(out) + 2)]
    for ranks, place in ((3, out), (1, folder / "unbroken")):
        job = [*launcher(), "-n", str(ranks), sys.executable, "-m", "zero_mpi.train"]
        job += [*flags, "--out", str(place), *last]
        subprocess.run(job, env=clean_environment(), check=True, stdout=subprocess.DEVNULL)
    assert not list(out.glob(".*")), "a partly written file is left"
    assert bytes_of(out) == bytes_of(folder / "unbroken"), "the bytes differ from those of an unbroken run"
    print(f"the bytes of an unbroken run; segments: {left[0]} after one kill, {segments()} at the end")
    return left[0], segments()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--shared-shm", action="store_true", help="other jobs use /dev/shm: skip its check")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    first, last = run(options.out, options.data, options.count, options.seed)
    assert options.shared_shm or last <= first, "/dev/shm has more segments than after the first kill"


if __name__ == "__main__":
    main()
