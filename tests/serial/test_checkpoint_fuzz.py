"""A damaged checkpoint is either refused or loads with the values that were written."""

import hashlib
import re
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import xxhash
from checkpoints import load_checkpoint, save_checkpoint

from zero_mpi import ShardedAdamW
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import check_digests, digest, open_checkpoint
from zero_mpi.checkpoint.state import MOST_SETTINGS, Description, TrainingProgress, read_json
from zero_mpi.errors import UsageError
from zero_mpi.models import Llama

MODEL, STATE = FILES = ("model.gguf", "optimizer.gguf")
SIZES = {"layers": 1, "dim": 12, "heads": 2, "kv_heads": 1, "ffn": 10, "context": 8, "vocab_size": 23}
CONFIG = Llama.from_flags(SIZES | {"tied": False})
PROGRESS = TrainingProgress(step=2, tokens=700, skipped=1, updates=3, samples=12)
SETTINGS = {"seed": 0, "model.arch": "llama", "corpus": "ab" * 32}
MACHINE, PLAN = {"threads": 1, "numpy": "2"}, {"lr": 0.004, "steps": 9}
DESCRIPTION = Description("llama", CONFIG.metadata(), SETTINGS, MACHINE, PLAN)
MOST_SECONDS = 2.0  # limit on CPU seconds per load; an undamaged pair of files takes 4 ms, with tracing 30 ms
ROOM = 1 << 20  # bytes for the buffers of readers, NumPy and JSON

Pair = dict[str, bytes]


def state_of(optimizer: ShardedAdamW) -> str:
    state = dict(optimizer.module.state_dict())
    for unit, states in optimizer.states.items():
        state |= {f"{name} {unit}": values for name, values in states.items()}
    return tiny.digest(state)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder, trained = folder, tiny.trained(CONFIG, 2)
        saved = save_checkpoint(folder / "whole", trained, PROGRESS, DESCRIPTION)
        second = tiny.trained(CONFIG, 1, seed=1)
        other = save_checkpoint(folder / "other", second, TrainingProgress(1), DESCRIPTION)
        self.pair, self.other = ({name: (at / name).read_bytes() for name in FILES} for at in (saved, other))
        files = {name: GGUFFile.open(saved / name) for name in FILES}
        self.index = {name: min(t.offset for t in file.tensors.values()) for name, file in files.items()}
        self.expected, self.target = state_of(trained), tiny.trained(CONFIG, 0, seed=5)

    def write(self, pair: Pair) -> None:
        for name, content in pair.items():
            (self.folder / name).write_bytes(content)

    def load(self, pair: Pair) -> bool:
        self.write(pair)
        try:
            check_digests(open_checkpoint(self.folder))
            progress = load_checkpoint(self.folder, self.target)
        except UsageError as error:
            line = str(error)
        else:
            assert progress == PROGRESS
            assert state_of(self.target) == self.expected
            return True
        assert line.isprintable()
        assert len(line) < 1000
        return False

    def run(self, pair: Pair) -> bool:
        start = time.process_time()
        tracemalloc.start()
        try:
            loaded = self.load(pair)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 * sum(map(len, pair.values())) + ROOM
        assert time.process_time() - start < MOST_SECONDS
        return loaded


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def test_a_digest_is_the_sha256_of_the_xxh3_of_4096_bytes():
    raw = np.random.default_rng(0).bytes(10000)
    parts = [xxhash.xxh3_128(raw[start : start + 4096]).digest() for start in (0, 4096, 8192)]
    assert digest(raw) == hashlib.sha256(b"".join(parts)).hexdigest()


def flip(content: bytes, place: int, bits: int) -> bytes:
    return content[:place] + bytes([content[place] ^ bits]) + content[place + 1 :]


@pytest.mark.timeout_seconds(180)
@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_refused_or_changes_nothing(name, bench, quick):
    """Flip a bit in every third (quick: eleventh) byte of the index, and bits of tensors."""
    content, index = bench.pair[name], bench.index[name]
    places = [*range(0, index, 11 if quick else 3), *range(index, len(content), 37)]
    loaded = [i for i in places if bench.load(bench.pair | {name: flip(content, i, 1 << i // 3 % 8)})]
    assert len(loaded) < 0.5 * len(places), "too many flipped bits had no effect"
    assert not set(loaded) & tensor_bytes(bench, name), "a bit of a tensor's data was accepted"


def tensor_bytes(bench: Bench, name: str) -> set[int]:
    tensors = GGUFFile.open(bench.folder / "whole" / "latest" / name).tensors.values()
    return {place for info in tensors for place in range(info.offset, info.offset + info.nbytes)}


@pytest.mark.parametrize("name", FILES)
def test_tensors_whose_values_were_swapped_are_refused(name, bench):
    tensors = GGUFFile.open(bench.folder / "whole" / "latest" / name).tensors
    gate, up = ([info for key, info in tensors.items() if word in key][-1] for word in ("ffn_gate", "ffn_up"))
    ranges = [slice(info.offset, info.offset + info.nbytes) for info in (gate, up)]
    data = bytearray(bench.pair[name])
    data[ranges[0]], data[ranges[1]] = data[ranges[1]], data[ranges[0]]
    assert not bench.run(bench.pair | {name: bytes(data)})


@pytest.mark.parametrize("name", FILES)
def test_halves_of_two_checkpoints_are_refused(name, bench):
    assert bench.run(bench.pair), "the undamaged pair loads"
    assert not bench.run(bench.pair | {name: bench.other[name]})
    ident = re.compile(rb"training\.checkpoint_id.{12}([0-9a-f]{32})", re.DOTALL)
    (new,), (old,) = (ident.findall(pair[name]) for pair in (bench.pair, bench.other))
    forged = bench.other[name].replace(old, new)  # the other checkpoint's file, with this checkpoint's id
    assert not bench.run(bench.pair | {name: forged})


def test_settings_that_are_too_long_are_refused_for_their_length():
    state = SimpleNamespace(path="it", metadata={"training.plan": " " * (MOST_SETTINGS + 1)})
    with pytest.raises(
        UsageError, match=r"training.plan: expected at most 1048576 characters, found 1048577"
    ):
        read_json(state, "training.plan")
