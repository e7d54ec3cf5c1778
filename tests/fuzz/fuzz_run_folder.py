"""Run folders with faulty files for `report`, `verify`, `train` and `inspect`.

A small run is trained when this module is imported; each case writes it again and damages it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import wild
from fuzz_toml import as_toml, clean

from zero_mpi.telemetry.proof import FIRST, KINDS, SAVED, digest_after

SIZES = ["--layers", "1", "--dim", "8", "--heads", "1", "--ffn", "8", "--context", "8", "--batch-size", "2"]
TRAIN = ["-m", "zero_mpi.train", "--data", "text.txt", "--out", "run", "--sample", "0", "--eval-windows", "1"]
TRAIN += [*SIZES, "--device", "cpu", "--log-every", "1", "--save-every", "2", "--timeout", "0"]
VERIFY = ["-m", "zero_mpi", "verify", "run", "--data", "text.txt", "--timeout", "0"]
COMPARE = ["-m", "zero_mpi", "inspect", "run", "run"]
RECORDS = ("metrics.jsonl", "events.jsonl", "proof.jsonl")
OBJECTS = ("status.json", "config.toml")
FILES = (*RECORDS, *OBJECTS)


def small_run() -> dict[str, bytes | str]:
    """Train four steps; return name -> content of the file (bytes) or target of the link (str)."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-run-"))
    try:
        (place / "text.txt").write_text("a text to train on\n" * 40)
        subprocess.run([sys.executable, *TRAIN, "--steps", "4"], cwd=place, check=True, capture_output=True)
        paths = [path for path in sorted((place / "run").rglob("*")) if path.is_symlink() or path.is_file()]
        name_of = {path: str(path.relative_to(place)) for path in paths}
        return {
            name_of[path]: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths
        }
    finally:
        shutil.rmtree(place, ignore_errors=True)


RUN = small_run()


def write_run(folder: Path) -> Path:
    (folder / "text.txt").write_text("a text to train on\n" * 40)
    for name, content in RUN.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
    return folder / "run"


def command(random: Random, *others: str) -> list[str]:
    kinds = [
        ["-m", "zero_mpi", "report", "run", *others],
        VERIFY,
        COMPARE,
        [*TRAIN, "--steps", "5"],
        [*TRAIN, "--steps", "5", "--config", "run/config.toml"],
    ]
    return random.choice(kinds)


def lines_of(raw: bytes) -> list[dict]:
    return [json.loads(line) for line in raw.splitlines()]


def types(random: Random, folder: Path) -> list[str]:
    run, name = write_run(folder), random.choice(FILES)
    path = run / name
    if name in RECORDS:
        rows = lines_of(path.read_bytes())
        for _ in range(random.choice([1, 2, len(rows)])):
            place = random.randrange(len(rows))
            rows[place] = wild.changed_json(random, rows[place])
        path.write_bytes(b"".join(wild.as_text(row, random) + b"\n" for row in rows))
    elif name == "status.json":
        path.write_bytes(wild.as_text(wild.changed_json(random, json.loads(path.read_bytes())), random))
    else:
        settings = {"layers": 1, "data": ["text.txt"], "lr": 0.1, "out": "run", "resume": "auto"}
        path.write_text(as_toml(wild.changed_json(random, settings)))
    return command(random)


def numbers(random: Random, folder: Path) -> list[str]:
    run = write_run(folder)
    name = random.choice([*RECORDS, "status.json"])
    rows = lines_of((run / name).read_bytes()) if name in RECORDS else [json.loads((run / name).read_bytes())]
    keys = sorted({key for row in rows for key in row})
    for key in random.sample(keys, min(len(keys), random.choice([1, 1, 3]))):
        value = random.choice([wild.number, wild.text])(random)
        many = 3000 if len(wild.as_text(value, random)) < 100 else 3  # limits the time to write the file
        for row in random.sample(rows, random.randint(1, len(rows))):
            row[key] = random.choice([value, [value] * random.choice([0, 1, many])])
    (run / name).write_bytes(b"".join(wild.as_text(row, random) + b"\n" for row in rows))
    return command(random)


def signed(random: Random, folder: Path) -> list[str]:
    """Write a chain with false lines and correct digests."""
    run, head, lines = write_run(folder), FIRST, list[bytes]()
    rows = lines_of((run / "proof.jsonl").read_bytes())
    for place in random.sample(range(len(rows)), random.choice([0, 1, 1, 3])):
        rows[place] = wild.changed_json(random, rows[place])
    if random.random() < 0.3:
        random.shuffle(rows)
    small = len(wild.as_text(rows, random)) < 20_000  # limits the time to write the file
    for row in rows * random.choice([1, 1, 1, 2, 500 if small else 2]):
        chained = {key: value for key, value in row.items() if key != "chain"} if type(row) is dict else row
        body = wild.as_text(chained, random)
        digest = digest_after(head, body)
        lines.append(body[:-1] + f', "chain": "{digest}"}}\n'.encode())
        if type(row) is not dict or next((kind for kind in KINDS if kind in row), None) != SAVED:
            head = digest
    (run / "proof.jsonl").write_bytes(b"".join(lines))
    return random.choice([VERIFY, VERIFY, COMPARE, command(random)])


def broken(random: Random, folder: Path) -> list[str]:
    run, name = write_run(folder), random.choice(FILES)
    path = run / name
    raw = path.read_bytes()
    first = raw.split(b"\n")[0] if name in RECORDS else raw
    many = random.choice([10, 1000, 100_000])
    kinds = (
        lambda: wild.broken_json(random, json.loads(first)) if name != "config.toml" else b"[" * many,
        lambda: wild.edited(random, raw),
        lambda: raw[: random.randrange(len(raw) + 1)],
        lambda: raw + b"\0" * (random.choice([1, 30, 120]) << 20),
        lambda: raw + b"{" * many + b"\n" + raw,
        lambda: (first + b"\n") * (many // 10),
        lambda: b"{}\n" * many * 10,
        lambda: b"[" * 900 + b"]" * 900 + b"\n" + raw,
        lambda: b"\n" * (20 << 20) + raw,
        lambda: raw.replace(b"\n", b"\r\n"),
        lambda: raw.replace(b"\n", b" "),
        lambda: b'{"event": "started", "ranks": 1}\n' * many,
        lambda: b'{"event": "' + b"x" * many * 9 + b'", "text": "' + b"\\u001b" * many + b'"}\n',
        lambda: b'{"step": 1, "memory_bytes": [' + b"1," * many + b"1]}\n",
    )
    path.write_bytes(random.choice(kinds)())
    return command(random)


def places(random: Random, folder: Path) -> list[str]:
    run = write_run(folder)
    if random.random() < 0.15:
        shutil.rmtree(run)
        wild.special(random, run)
    for name in random.sample(FILES, random.choice([1, 1, 2])) if run.is_dir() else ():
        path = run / name
        if random.random() < 0.15 and path.is_file():
            with path.open("r+b") as file:
                file.truncate(8 << 30)
        else:
            path.unlink(missing_ok=True)
            wild.special(random, path)
    return command(random)


def checkpoints(random: Random, folder: Path) -> list[str]:
    """Replace links, folders and files of checkpoints, or add odd names next to them."""
    run = write_run(folder)
    newest = run / "step-00000004"
    path = random.choice([run / "latest", newest, newest / "model.gguf", newest / "optimizer.gguf"])
    kind = random.randrange(4)
    if kind == 0:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        wild.special(random, path)
    elif kind == 1 and path.suffix == ".gguf":
        raw = path.read_bytes()
        path.write_bytes(random.choice([wild.edited(random, raw), raw[: random.randrange(len(raw))]]))
    elif kind == 2:
        (run / "latest").unlink()
        target = clean(wild.text(random)).replace("\0", "")[:4000] or "."
        (run / "latest").symlink_to(target)
    else:
        odd = clean(wild.text(random)).replace("\0", "").replace("/", "_")[:200].strip(".") or "x"
        name = random.choice([f"step-{'9' * 30}", f"step-{odd}"[:80], odd[:80], "step-00000009"])
        (run / name).mkdir(exist_ok=True)
    inspect = ["-m", "zero_mpi", "inspect", random.choice(["run", "run/latest", "run/step-00000004"])]
    return random.choice([inspect, [*inspect, "run/step-00000002"], command(random)])


def sound(random: Random, folder: Path) -> list[str]:
    write_run(folder)
    return random.choice([command(random), ["-m", "zero_mpi", "inspect", "run"]])


CASES = {"sound": sound, "types": types, "numbers": numbers, "signed": signed, "broken": broken}
CASES |= {"places": places, "checkpoints": checkpoints}
