"""Run folders for the tests of the report, written by hand so that they can hold any content."""

import json
import math
from pathlib import Path

START = "2026-11-21T18:00:00Z"
LATEST_JOB = 20  # step after which the job of EVENTS began


def record(step, **fields):
    seconds = 0.25
    return {
        "step": step,
        "loss": 1 + 4 * math.exp(-step / 40),
        "grad_norm": 0.4 + math.exp(-step / 20),
        "lr": 1e-3 * min(1, step / 10),
        "tokens": 2048 * step,
        "tokens_per_second": 2048 / seconds,
        "step_seconds": seconds,
        "wait_seconds": seconds / 8,
        "sent_bytes": 1 << 20,
        "skipped": 0,
        "mfu": 0.4,
        **fields,
    }


def records(steps, every=10):
    for step in range(1, steps + 1):
        due = step % every == 0
        memory = [3 << 20, 5 << 20, 4 << 20] if step > LATEST_JOB else [9 << 20, 7 << 20]
        fields = {"val_loss": 1.2 + 4 * math.exp(-step / 40), "memory_bytes": memory}
        yield record(step, **(fields if due else {}))


def event(name, step, **fields):
    return {"time": START, "event": name, "step": step, **fields}


STARTED = event(
    "started", 0, ranks=2, hosts=[["here", 2]], arch="llama", parameters=1234567,
    strategy="full-shard", transport="shared, 2 MiB", device="cpu", precision="fp32", threads=1,
    version="0.1.0", planned_bytes=1 << 22,
)  # fmt: skip
EVENTS = (
    STARTED,
    event("saved", 20, folder="step-00000020", digest="ab" * 32, seconds=0.5, bytes=1 << 20),
    event("lost", 33, reason="a job of 2 rank(s) was killed"),
    {**STARTED, "step": 20, "ranks": 3},
    event("resumed", 20, folder="step-00000020", from_ranks=2),
    event("warning", 20, text="NumPy changed"),
    event("sample", 60, folder="step-00000060", prompt="def ", text="def f(x):\n    return x\n"),
    event("done", 60, reason=""),
)


def write_run(folder, rows=None, *, events=EVENTS, status=None, config="steps = 60\nlr = 0.001\n"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(records(60)) if rows is None else rows
    (folder / "metrics.jsonl").write_text(as_lines(rows))
    if events is not None:
        (folder / "events.jsonl").write_text(as_lines(events))
    if status is not None:
        (folder / "status.json").write_text(json.dumps(status))
    if config is not None:
        (folder / "config.toml").write_text(config)
    return folder


def as_lines(rows):
    """Return objects as JSON and texts unchanged, each on a line."""
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def status(state="done", **fields):
    common = {"reason": "", "step": 60, "steps": 60, "ranks": 2, "host": "here", "pid": 1, "version": "0.1.0"}
    return {"state": state, **common, "started": START, "updated": START, **fields}
