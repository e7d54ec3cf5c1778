"""`proof.jsonl`: a chain that nobody changes unseen, what a resume keeps of it, checkpoints in their turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero_mpi.config.replay import PATHS
from zero_mpi.config.settings import FIELDS
from zero_mpi.session.identity import NAMES
from zero_mpi.telemetry.proof import FIRST, Broken, JobStart, Proof, bits_of, digest_after, read_proof

RUN = {"settings": {"seed": 1}, "machine": {"threads": 1}}


def write(path: Path, start: JobStart, steps: range, saves: tuple[int, ...] = ()) -> Proof:
    """A job that makes steps and saves some of them."""
    proof = Proof(path, start)
    for step in steps:
        proof.record(step, {"loss": 1.0 / step, "step_seconds": 2.5})
        if step in saves:
            proof.saving(step)
            proof.saved(step, f"id {step}", f"state {step}")
    proof.close()
    return proof


def kinds(path: Path) -> list[tuple[int, str]]:
    return [(line.step, line.kind) for line in read_proof(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A chain of four steps, of which 2 and 4 were saved."""
    write(tmp_path / "proof.jsonl", JobStart(0, RUN), range(1, 5), (2, 4))
    return tmp_path / "proof.jsonl"


def test_lines_hold_what_is_bits_and_each_stands_for_those_before(path):
    lines = list(read_proof(path))
    assert kinds(path) == [
        (0, "run"), (1, "record"), (2, "record"), (2, "checkpoint"), (3, "record"), (4, "record"),
        (4, "checkpoint"),
    ]  # fmt: skip
    assert lines[0].value == {"from": None, **RUN}
    assert lines[1].value == {"loss": 1.0}, "no time is in it"
    assert lines[3].value == {"id": "id 2", "state": "state 2"}
    head = FIRST
    for line, raw in zip(lines, path.read_bytes().splitlines(), strict=True):
        body = json.loads(raw)
        assert body.pop("chain") == (head := digest_after(head, json.dumps(body).encode())) == line.head


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda rows: [*rows[:2], rows[2].replace(b"0.5", b"0.6"), *rows[3:]], 3),
        (lambda rows: [*rows[:1], *rows[2:]], 2),
        (lambda rows: [rows[0], rows[2], rows[1], *rows[3:]], 2),
        (lambda rows: [*rows, rows[-1]], 8),
        (lambda rows: [*rows, b"\n"], 8),
        (lambda rows: [rows[0].replace(b": ", b":", 1), *rows[1:]], 1),
        (lambda rows: [*rows[:3], rows[3][:-20]], 4),
        (lambda rows: [b"x" * (3 << 20)], 1),
    ],
    ids=["changed", "removed", "exchanged", "appended", "empty", "spaces", "torn", "long"],
)
def test_whatever_is_done_to_a_line_shows_at_it(path, change, number):
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(Broken, match=rf"^line {number}: "):
        list(read_proof(path))


@pytest.mark.parametrize(
    "body",
    [
        b'{"step": 1}',
        b'{"step": -1, "record": {}}',
        b'{"step": 1, "record": 2}',
        b'{"step": true, "run": {}}',
    ],
)
def test_what_is_signed_and_no_line_is_refused(tmp_path, body):
    chain = f', "chain": "{digest_after(FIRST, body)}"}}\n'.encode()
    (tmp_path / "p").write_bytes(body[:-1] + chain)
    with pytest.raises(Broken, match="expected a step"):
        list(read_proof(tmp_path / "p"))


def test_a_resume_leaves_the_file_of_a_run_never_stopped(path, tmp_path):
    """Whatever a kill left behind the checkpoint: records after it, half a line, or not even its own line."""
    whole = path.read_bytes()
    rows = whole.splitlines(keepends=True)
    resumed = JobStart(2, RUN, "id 2", "state 2", own=True)
    for left in (whole, b"".join(rows[:5]) + rows[5][:30], b"".join(rows[:4]), b"".join(rows[:3])):
        path.write_bytes(left)
        proof = write(path, resumed, range(3, 5), (4,))
        assert path.read_bytes() == whole
        assert proof.head == json.loads(rows[-1])["chain"]


@pytest.mark.parametrize(
    ("start", "kept"),
    [
        (JobStart(2, {**RUN, "machine": {"threads": 2}}, "id 2", "state 2", own=True), 4),
        (JobStart(2, RUN, "another", "state", own=True), 4),
        (JobStart(2, RUN, "another", "state", own=False), 4),
        (JobStart(3, RUN, "given up", "state", own=False), 5),
        (JobStart(9, RUN, "far", "state", own=True), 7),
        (JobStart(0, RUN), 0),
    ],
    ids=["machine", "other id", "elsewhere", "not saved", "gap", "anew"],
)
def test_what_does_not_simply_go_on_says_from_where(path, start, kept):
    """Another machine or checkpoint, or steps that nobody recorded: a line tells; a new run keeps nothing."""
    before = kinds(path)
    write(path, start, range(start.step + 1, start.step + 2))
    assert kinds(path) == [*before[:kept], (start.step, "run"), (start.step + 1, "record")]
    assert list(read_proof(path))[kept].value == {"from": start.origin, **start.run}


def test_a_broken_chain_is_kept_up_to_where_it_broke(path):
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*rows[:2], rows[2].replace(b"0.5", b"0.6"), *rows[3:]]))
    write(path, JobStart(4, RUN, "id 4", "state 4", own=True), range(5, 6))
    assert kinds(path) == [(0, "run"), (1, "record"), (4, "run"), (5, "record")]


def test_a_checkpoint_behind_training_keeps_its_place(path, tmp_path):
    """The line of a save that takes three steps comes where that of one comes which nobody waited for."""
    proof = Proof(tmp_path / "behind", JobStart(0, RUN))
    for step in range(1, 5):
        if step == 4:
            proof.saved(2, "id 2", "state 2")
        proof.record(step, {"loss": 1.0 / step})
        if step in (2, 4):
            proof.saving(step)
        assert len(kinds(tmp_path / "behind")) == [2, 3, 3, 6][step - 1], "records wait for their turn"
    proof.saved(4, "id 4", "state 4")
    proof.close()
    assert (tmp_path / "behind").read_bytes() == path.read_bytes()


# Settings that move no bit of a record or checkpoint, as tests of exactness show for those of computing.
MOVE_NOTHING = [
    "epochs",
    "resume",
    "dry_run",
    "sample",
    "prompt",
    "strategy",
    "bucket_mb",
    "prefetch",
    "recompute",
    "transport",
    "device",
    "offload",
    "threads",
    "save_every",
    "keep",
    "async_save",
    "checkpoint_io",
    "writers_per_node",
    "log_every",
    "log_level",
    "tensorboard",
    "wandb",
    "mlflow",
    "trace_steps",
    "timeout",
    "check_collectives",
    "max_time",
]


def test_every_setting_moves_bits_and_is_in_the_chain_or_is_known_not_to():
    """A path stands for what lies there, whose digest is in it; device and threads are of the machine."""
    assert sorted(FIELDS) == sorted([*NAMES, *PATHS, *MOVE_NOTHING])


def test_bits_are_no_times():
    assert bits_of({"step": 3, "loss": 1.5, "val_loss": None, "tokens_per_second": 3.0, "joules": 1}) == {
        "loss": 1.5,
        "val_loss": None,
    }
