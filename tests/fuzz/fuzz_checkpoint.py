"""Checkpoints with wrong keys, with or without a new signature, and checkpoints with damaged files.

A checkpoint has a signature over all keys, which reveals most changes. Many cases therefore sign the files
again, as a program that writes such a folder would do.
"""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import fuzz_gguf
import numpy as np
import tiny
import wild
from checkpoints import save_checkpoint

from zero_mpi import GradAccum, SerialComm, ShardedAdamW
from zero_mpi.checkpoint.gguf.header import pack_file
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import ID, signature
from zero_mpi.checkpoint.state import Description, TrainingProgress
from zero_mpi.data import ByteTokenizer
from zero_mpi.models import Llama

SIZES = {"layers": 1, "dim": 8, "heads": 2, "kv_heads": 1, "ffn": 16, "context": 16, "vocab_size": 260}
FLAGS = ["--layers", "1", "--dim", "8", "--heads", "2", "--kv-heads", "1", "--ffn", "16"]
NAMES = ("model.gguf", "optimizer.gguf")
INTERESTING = ("training.", "optimizer.", "general.", "tokenizer.ggml.t")

Keys = dict[str, Any]


@cache
def trained() -> dict[str, tuple[Keys, list[tuple[str, np.ndarray]], bytes]]:
    """Train one step; return name -> (keys, tensors, bytes) of both files."""
    config = Llama.from_flags(SIZES | {"tied": False})
    optimizer = ShardedAdamW(tiny.make(SerialComm(), config), lr=1e-3)
    accumulator = GradAccum(optimizer.module, 2)
    tiny.run_step(optimizer.module, accumulator, config, 0, 2)
    optimizer.step(max_norm=1.0)
    settings = {"seed": 0, "model.arch": "llama", "corpus": "ab" * 32, "data.tokenizer": "byte"}
    keys = config.metadata() | ByteTokenizer().metadata()
    facts = Description("llama", keys, settings, {"threads": 1, "numpy": "2"}, {"lr": 0.004, "steps": 9})
    place = Path(tempfile.mkdtemp(prefix="fuzz-checkpoint-"))
    try:
        folder = save_checkpoint(place, optimizer, TrainingProgress(1, 32, 0, 1, 2), facts)
        return {name: parts(folder / name) for name in NAMES}
    finally:
        shutil.rmtree(place)


def parts(path: Path) -> tuple[Keys, list[tuple[str, np.ndarray]], bytes]:
    file = GGUFFile.open(path)
    return file.metadata, [(name, file.tensor(name)) for name in file.tensors], path.read_bytes()


def odd_value(random: Random) -> Any:
    kind = random.randrange(8)
    if kind <= 1:
        return random.choice([t for t in wild.TEXTS if t.isascii() or "\ud800" not in t])
    if kind == 2:
        number = random.choice([n for n in wild.INTEGERS if 0 <= n < 2**64])
        return np.uint64(number)
    if kind == 3:
        return random.choice([np.float32("nan"), np.float64(1e300), np.int8(-1), True, False, np.uint32(2)])
    if kind == 4:
        return np.array([1.5, 2.5], np.float32)
    if kind == 5:
        return [random.choice(["", "a", "x y", "\n\x1b"]) for _ in range(random.choice([0, 1, 260, 3000]))]
    if kind == 6:
        return random.choice(
            ["[" * 3000, "1" * 5000, '{"a": 1e999}', '{"a":' * 900 + "1" + "}" * 900, "null"]
        )
    values = {wild.text(random)[:1000]: wild.value(random) for _ in range(3)}
    return json.dumps({"seed": wild.value(random), **values})


def changed(random: Random) -> dict[str, bytes]:
    files = {name: (dict(keys), tensors) for name, (keys, tensors, _) in trained().items()}
    for _ in range(random.choice([1, 1, 2, 4])):
        keys, _ = files[random.choice(NAMES)]
        targets = [key for key in keys if key.startswith(INTERESTING)]
        key = random.choice(targets if random.random() < 0.8 else list(keys))
        if random.random() < 0.1:
            del keys[key]
        else:
            keys[key] = odd_value(random)
    (model, _), (state, _) = files.values()
    if random.random() < 0.8 and all(isinstance(keys.get(ID), str) for keys in (model, state)):
        model[ID] = state[ID] = signature(model, state)
    return {name: packed(*file) for name, file in files.items()}


def packed(keys: Keys, tensors: list[tuple[str, np.ndarray]]) -> bytes:
    arch = keys.get("general.architecture")
    if not isinstance(arch, str) or not arch or keys.get("general.alignment") is not None:
        keys = {key: value for key, value in keys.items() if key != "general.alignment"}
        keys["general.architecture"] = arch = "llama"
    header, _, _ = pack_file(arch, keys, [(name, array.shape) for name, array in tensors])
    data = b"".join(a.tobytes() + bytes(-a.nbytes % 32) for _, a in tensors)
    return header + data


def write(folder: Path, files: dict[str, bytes]) -> Path:
    place = folder / "out" / "step-00000001"
    place.mkdir(parents=True)
    (folder / "out" / "latest").symlink_to("step-00000001")
    for name, content in files.items():
        (place / name).write_bytes(content)
    return place


def command(random: Random, folder: Path) -> list[str]:
    flags = random.sample(["--keys", "--tensors", "--json"], random.randint(0, 2))
    commands = [
        ["-m", "zero_mpi", "inspect", "out", *flags],
        ["-m", "zero_mpi", "inspect", "out/latest", "out/latest"],
        ["-m", "zero_mpi", "inspect", f"out/latest/{random.choice(NAMES)}", *flags],
        ["-m", "zero_mpi", "generate", "out/latest", "--tokens", "2"],
        ["-m", "zero_mpi", "export", "out/latest", "y.gguf"],
        ["-m", "zero_mpi", "report", "out", "--out", "report.html"],
        fuzz_gguf.train(folder, "--resume", "auto", *FLAGS),
        fuzz_gguf.train(folder, "--init", "out/latest", "--resume", "never", "--out", "new"),
    ]
    return random.choice(commands)


def keys(random: Random, folder: Path) -> list[str]:
    write(folder, changed(random))
    return command(random, folder)


def noise(random: Random, folder: Path) -> list[str]:
    files = {name: raw for name, (_, _, raw) in trained().items()}
    name = random.choice(NAMES)
    files[name] = wild.edited(random, files[name])
    write(folder, files)
    return command(random, folder)


def special(random: Random, folder: Path) -> list[str]:
    place = write(folder, {name: raw for name, (_, _, raw) in trained().items()})
    target = random.choice([*(place / name for name in NAMES), folder / "out" / "latest"])
    target.unlink()
    wild.special(random, target)
    return command(random, folder)


CASES = {"keys": keys, "noise": noise, "special": special}
trained()  # train once before any process is forked
