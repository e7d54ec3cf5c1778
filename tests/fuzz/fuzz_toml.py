"""Faulty settings and machines in TOML for `train --config ... --dry-run` and `plan`.

Model sizes stay moderate, because a command may be slow for a large model.
"""

import tomllib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tomli_w
import wild

from zero_mpi.config.settings import FIELDS

SIZES = {"layers": 1, "dim": 16, "heads": 2, "kv_heads": 1, "ffn": 16, "vocab_size": 300, "context": 8}
ALWAYS = {**SIZES, "batch_size": 2, "micro_batch": 1, "data": ["ids.npy"]}
MODERATE = (0, -1, 1, 2, 3, 7, 64, 255, 1000, 0.5, 1e999, "x", True, [], {}, "\x1b[2J", 10**400)
# Settings whose large values make a command slow, which is no fault.
BIG = {*SIZES, "prefetch", "batch_size", "micro_batch", "eval_windows"}


def settings(random: Random) -> dict[str, Any]:
    values: dict[str, Any] = dict(ALWAYS)
    for _ in range(random.choice([1, 1, 2, 5])):
        name = random.choice(list(FIELDS))
        choices = FIELDS[name].metadata["choices"]
        if name in BIG:
            values[name] = random.choice(MODERATE)
        elif choices and random.random() < 0.5:
            values[name] = random.choice([*choices, choices[0].upper(), choices[0] + "\n"])
        elif name != "data":
            values[name] = wild.value(random)
    if random.random() < 0.3:
        values[wild.name(random, list(FIELDS))] = wild.value(random)
    return values


def as_toml(content: Any) -> str:
    return tomli_w.dumps(sayable(content))


def sayable(value: Any) -> Any:
    """Return a value without null and lone surrogates, which TOML cannot express."""
    if isinstance(value, dict):
        return {clean(key): sayable(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [sayable(inner) for inner in value if inner is not None]
    return clean(value) if isinstance(value, str) else value


def clean(text: str) -> str:
    return text.encode(errors="ignore").decode()


def command(random: Random, folder: Path) -> list[str]:
    """Return a command that reads `run.toml` with --config."""
    np.save(folder / "ids.npy", np.arange(2000, dtype=np.uint16) % 300)
    config = ["--config", "run.toml"]
    if random.random() < 0.5:
        return ["-m", "zero_mpi", "plan", *config]
    return ["-m", "zero_mpi.train", *config, "--dry-run", "--out", "out", "--device", "cpu"]


def types(random: Random, folder: Path) -> list[str]:
    (folder / "run.toml").write_text(as_toml(settings(random)))
    return command(random, folder)


def broken(random: Random, folder: Path) -> list[str]:
    """Write broken TOML, or TOML that is hard to parse."""
    raw = as_toml(ALWAYS).encode()
    many = random.choice([10, 1000, 100_000])
    kinds = (
        lambda: raw[: random.randrange(len(raw) + 1)],
        lambda: wild.edited(random, raw),
        lambda: b"a." * many + b"b = 1\n",
        lambda: b"lr = " + b"[" * many,
        lambda: b"lr = " + b"[" * 150 + b"]" * 150,
        lambda: b"lr = " + b"{a=" * many,
        lambda: b"lr = " + b"9" * many,
        lambda: b"seed = 0x" + b"f" * many,
        lambda: b"lr = 0." + b"1" * many + b"e" + b"9" * 100,
        lambda: b"".join(b"[t%d]\n" % i for i in range(many // 10)),
        lambda: b"[[a]]\n" * many,
        lambda: b"[" + b"a." * many + b"b]\n",
        lambda: raw + b"lr = 1\n" + raw,
        lambda: b"\xef\xbb\xbf" + raw,
        lambda: raw.decode().encode("utf-16"),
        lambda: b'out = "' + b"x" * many * 10 + b'"\n',
        lambda: b"data = [" + b'"text.txt",' * many + b"]\n",
        lambda: b'"' + b"k" * many * 10 + b'" = 1\n',
        lambda: b"#" * (random.choice([1, 70]) << 20),
        lambda: raw.replace(b"layers", b"lay\xffers"),
        lambda: b"seed = 1979-05-27T07:32:00Z\n" + raw,
        lambda: b"\0" * many,
    )
    (folder / "run.toml").write_bytes(random.choice(kinds)())
    return command(random, folder)


def places(random: Random, folder: Path) -> list[str]:
    args = command(random, folder)
    if random.random() < 0.5:
        wild.special(random, folder / "run.toml")
        return args
    name = clean(wild.text(random)).replace("\0", "") or "x"
    flag = random.choice(["--config", "--config", "--out", "--init", "--tokenizer", "--data", "--resume"])
    (folder / "run.toml").write_text(as_toml(ALWAYS))
    return [*args, f"{flag}={name[:60_000]}"]


def flags(random: Random, folder: Path) -> list[str]:
    args = command(random, folder)
    (folder / "run.toml").write_text(as_toml(ALWAYS))
    name = random.choice([name for name in FIELDS if name not in BIG])
    odd = clean(wild.text(random)).replace("\0", "")[:60_000]
    flag = "--" + name.replace("_", "-")
    return [*args, random.choice([f"{flag}={odd}", f"--{odd}", odd, f"{flag}{odd}"])]


def sound(random: Random, folder: Path) -> list[str]:
    (folder / "run.toml").write_text(as_toml(ALWAYS))
    return command(random, folder)


EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "machines"
MODEL = ["--layers", "8", "--dim", "4096", "--heads", "8", "--context", "1024", "--vocab-size", "300"]


def described(random: Random) -> dict[str, Any]:
    return tomllib.loads((EXAMPLES / random.choice(["small.toml", "large.toml"])).read_text())


def machine_command(random: Random, folder: Path, machine: dict[str, Any] | bytes) -> list[str]:
    raw = machine if isinstance(machine, bytes) else as_toml(machine).encode()
    (folder / "machine.toml").write_bytes(raw)
    mode = random.choice([["--sweep", "--most-ranks", "4"]] * 4 + [["--ranks", "4"]])
    return ["-m", "zero_mpi", "plan", *MODEL, *mode, "--strategy", "full-shard", "--machine", "machine.toml"]


def machine_types(random: Random, folder: Path) -> list[str]:
    return machine_command(random, folder, wild.changed_json(random, described(random)))


def machine_broken(random: Random, folder: Path) -> list[str]:
    raw = as_toml(described(random)).encode()
    cut = raw[: random.randrange(len(raw) + 1)]
    return machine_command(
        random, folder, random.choice([cut, wild.edited(random, raw), raw + raw, b"[[network]]\n" * 9999])
    )


def machine_sound(random: Random, folder: Path) -> list[str]:
    return machine_command(random, folder, described(random))


CASES = {"sound": sound, "types": types, "broken": broken, "places": places, "flags": flags}
CASES |= {"machine.sound": machine_sound, "machine.types": machine_types, "machine.broken": machine_broken}
