"""A wrong value of a GGUF key gives one line with file, key, expected and found value."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import fuzz_gguf
import numpy as np
import pytest

from zero_mpi.checkpoint.weights import open_weights
from zero_mpi.commands.export.command import command as export
from zero_mpi.commands.generate.command import command as generate
from zero_mpi.commands.inspect.command import command as inspect
from zero_mpi.config.inputs import read_model
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import MERGES, GGUFKeys
from zero_mpi.launch.world import World

ODD = {"a number": fuzz_gguf.typed(4, 3), "floats": fuzz_gguf.array(6, [1.5, 2.5])}
ODD |= {"no floats": fuzz_gguf.array(6, []), "a bool": fuzz_gguf.typed(7, True)}
ODD |= {"bools": fuzz_gguf.array(7, [True, False]), "a text": fuzz_gguf.typed(8, "x\n\x1b[1m")}
ODD |= {"a long text": fuzz_gguf.typed(8, "x" * 3_000_000), "texts": fuzz_gguf.array(8, ["a", "b"])}
HEAD = "tokenizer.ggml."
WRONG = {  # wrong values for a key, by kind
    "general.architecture": [*(kind for kind in ODD if "text" not in kind), "texts"],
    f"{HEAD}model": ["a number", "floats", "bools", "texts"],
    f"{HEAD}pre": ["a number", "floats", "texts"],
    f"{HEAD}tokens": ["a number", "a bool", "a text", "floats", "bools"],
    f"{HEAD}merges": ["a number", "floats", "bools", "a long text"],
    f"{HEAD}token_type": ["a number", "a text", "floats", "no floats", "bools", "texts"],
    f"{HEAD}add_bos_token": ["a number", "a text", "floats", "bools", "texts"],
    f"{HEAD}bos_token_id": ["a text", "floats", "no floats", "bools", "texts"],
    "llama.block_count": ["a text", "floats", "a bool", "texts"],
    "llama.attention.layer_norm_rms_epsilon": ["a long text", "floats", "a bool"],
    "llama.attention.causal": ["a number", "texts"],
}
COMMANDS = {
    "inspect": (inspect, []),
    "export": (export, ["folder"]),
    "generate": (generate, ["--tokens", "1"]),
}


@cache
def llama() -> fuzz_gguf.File:
    keys = {"general.architecture": fuzz_gguf.typed(8, "llama"), MERGES: fuzz_gguf.array(8, ["a b"])}
    models = (fuzz_gguf.model(random.Random(seed)) for seed in range(1000))
    return next(
        file for file in models if keys.items() <= dict(file.keys).items() and len(file.tensors) == 11
    )


def write(path: Path, changes: dict[str, bytes]) -> Path:
    keys = dict(llama().keys) | changes
    path.write_bytes(replace(llama(), keys=list(keys.items())).bytes())
    return path


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(("key", "kind"), [(key, kind) for key, kinds in WRONG.items() for kind in kinds])
def test_a_value_of_another_type_is_refused_by_name_or_shown(key, kind, name, tmp_path, monkeypatch, capfd):
    """`inspect` shows files in which some of these keys are wrong; all other commands refuse them."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.gguf", {key: ODD[kind]})
    action, flags = COMMANDS[name]
    try:
        assert action(World(0, 1), ["x.gguf", *flags]) == 0
        line = ""
    except UsageError as error:
        line = str(error)
    if name == "inspect" and key.startswith(("llama.", f"{HEAD}token_type", f"{HEAD}add_bos")):
        assert line == ""
        output = " ".join(capfd.readouterr().out.split())
        assert not key.startswith("llama.") or f"cannot_run the GGUF key {key}: expected" in output
    else:
        assert f"x.gguf: the GGUF key {key}: expected " in line
        assert line.isprintable()
        assert len(line) < 500


def test_numbers_have_ranges():
    keys = GGUFKeys({"a": np.uint64(1 << 63), "b": np.float32("inf"), "c": np.int8(-1), "d": True}, "f")
    for name in "acd":
        with pytest.raises(UsageError, match=rf"^f: the GGUF key {name}: expected a whole number"):
            keys.integer(name)
    for name in "bd":
        with pytest.raises(UsageError, match=rf"key {name}: expected a finite number"):
            keys.number(name)
    assert keys.number("c") == -1
    assert (keys.integer("x"), keys.text("x"), keys.texts("x"), keys.flag("x")) == (None,) * 4


def test_a_size_of_billions_costs_nothing(tmp_path):
    huge = {
        f"llama.{name}": fuzz_gguf.typed(4, 2**31 - 2) for name in ("feed_forward_length", "context_length")
    }
    source = open_weights(write(tmp_path / "x.gguf", huge | {"llama.attention.key_length": ODD["a number"]}))
    with pytest.raises(UsageError, match=r"x\.gguf: "):
        read_model(source)
