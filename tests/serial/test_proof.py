"""`proof.jsonl`: its chain shows any change, and a resume continues it."""

import json
from pathlib import Path

import pytest

from zero_mpi.config.settings import FIELDS
from zero_mpi.config.toml import PATHS
from zero_mpi.telemetry.proof import FIRST, JobStart, Proof, digest_after, read_proof
from zero_mpi.train.description import NAMES

RUN = {"settings": {"seed": 1}, "machine": {"threads": 1}}
# The chain of `path` as version 0.1.0 wrote it: a checkpoint's digest was the next head.
OLD = """\
{"step": 0, "run": {"from": null, "settings": {"seed": 1}, "machine": {"threads": 1}}, "chain": \
"61d1dcbbab75d9ed870e168ee3d6ccba472f6781d1edd31f835d8e82536bb29b"}
{"step": 1, "record": {"loss": 1.0}, "chain": \
"cb36393786635a6b01eb718e56a15e30675e09bfb0ea79a44c1fabd1358d0605"}
{"step": 2, "record": {"loss": 0.5}, "chain": \
"95f275e28b4866a899e432aeba84d2906e78ec8a374399758aad3b445369a082"}
{"step": 2, "checkpoint": {"id": "id 2", "state": "state 2"}, "chain": \
"42c9e5936ee1cf7003521baeb0ec5dae454526bcf1efd5a20c0f681d338d5e38"}
{"step": 3, "record": {"loss": 0.3333333333333333}, "chain": \
"c97786439b67bf0224253507c58e1b6d59f8fb0bb61aa7c43c6ad667a115b13c"}
{"step": 4, "record": {"loss": 0.25}, "chain": \
"57a9e5650c8f5f8f486500a809ad2b4d1d11c5b695a8870d2eaaf715603547c2"}
{"step": 4, "checkpoint": {"id": "id 4", "state": "state 4"}, "chain": \
"17d4b04891f06964ff9efc59d215c9cd5009044612817f01cb469c953c49ee35"}
"""


def write(path: Path, start: JobStart, steps: range, saves: tuple[int, ...] = ()) -> Proof:
    proof = Proof(path, start)
    for step in steps:
        proof.record(step, {"loss": 1.0 / step, "step_seconds": 2.5})
        if step in saves:
            proof.saved(step, f"id {step}", f"state {step}")
    proof.close()
    return proof


def head_of(path: Path) -> str:
    return list(read_proof(path))[-1].head


def kinds(path: Path) -> list[tuple[int, str]]:
    return [(line.step, line.kind) for line in read_proof(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "proof.jsonl", JobStart(0, RUN), range(1, 5), (2, 4))
    return tmp_path / "proof.jsonl"


def test_lines_hold_what_is_bits_and_each_stands_for_those_before(path):
    lines = list(read_proof(path))
    assert kinds(path) == [
        (0, "run"), (1, "record"), (2, "record"), (2, "checkpoint"), (3, "record"), (4, "record"),
        (4, "checkpoint"),
    ]  # fmt: skip
    assert lines[0].value == {"from": None, **RUN}
    assert lines[1].value == {"loss": 1.0}, "a record has no times"
    assert lines[3].value == {"id": "id 2", "state": "state 2"}
    head = FIRST
    for line, raw in zip(lines, path.read_bytes().splitlines(), strict=True):
        body = json.loads(raw)
        assert body.pop("chain") == (digest := digest_after(head, json.dumps(body).encode()))
        assert line.head == (head := head if "saved" in body else digest)


def test_a_resume_leaves_the_file_of_a_run_never_stopped(path, tmp_path):
    """A kill may leave records after the checkpoint, half a line, or no line for the checkpoint.

    A checkpoint's line that was written late is moved, even if the run continues in another folder.
    """
    content = path.read_bytes()
    rows = content.splitlines(keepends=True)
    behind = Proof(tmp_path / "behind", JobStart(0, RUN))
    for step in (1, 2, 3):
        behind.record(step, {"loss": 1.0 / step})
    behind.saved(2, "id 2", "state 2")
    behind.close()
    late = (tmp_path / "behind").read_bytes()
    for left, own in (
        (content, True), (b"".join(rows[:5]) + rows[5][:30], True), (b"".join(rows[:4]), True),
        (b"".join(rows[:3]), True), (content, False), (late, True), (late, False),
    ):  # fmt: skip
        path.write_bytes(left)
        proof = write(path, JobStart(2, RUN, "id 2", "state 2", own), range(3, 5), (4,))
        assert path.read_bytes() == content
        assert proof.head == head_of(path)


def test_a_chain_of_0_1_0_is_read_and_gone_on_with(path):
    path.write_text(OLD)
    assert kinds(path)[3] == (2, "checkpoint")
    assert head_of(path) == "17d4b04891f06964ff9efc59d215c9cd5009044612817f01cb469c953c49ee35"
    write(path, JobStart(4, RUN, "id 4", "state 4", own=True), range(5, 7), (6,))
    assert path.read_text().startswith(OLD)
    assert kinds(path)[7:] == [(5, "record"), (6, "record"), (6, "checkpoint")]
    write(path, JobStart(2, RUN, "id 2", "state 2", own=True), range(3, 4))
    assert kinds(path)[3:] == [(2, "checkpoint"), (3, "record")]


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
    """A resume with another machine, checkpoint or step records its origin; a new run drops all lines."""
    before = kinds(path)
    write(path, start, range(start.step + 1, start.step + 2))
    assert kinds(path) == [*before[:kept], (start.step, "run"), (start.step + 1, "record")]
    origin = "chain" if start.own and start.origin == "id 2" else start.origin
    assert list(read_proof(path))[kept].value == {"from": origin, **start.run}


def test_a_broken_chain_is_kept_up_to_where_it_broke(path):
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*rows[:2], rows[2].replace(b"0.5", b"0.6"), *rows[3:]]))
    write(path, JobStart(4, RUN, "id 4", "state 4", own=True), range(5, 6))
    assert kinds(path) == [(0, "run"), (1, "record"), (4, "run"), (5, "record")]


# Settings that change no bit of a record or checkpoint.
MOVE_NOTHING = [
    "epochs", "resume", "dry_run", "sample", "prompt", "strategy", "bucket_mb", "prefetch", "recompute",
    "transport", "device", "offload", "threads", "save_every", "keep", "async_save", "checkpoint_io",
    "writers_per_node", "log_every", "log_level", "tensorboard", "wandb", "mlflow", "trace_steps",
    "timeout", "check_collectives", "max_time",
]  # fmt: skip


def test_every_setting_moves_bits_and_is_in_the_chain_or_is_known_not_to():
    """The chain has the data's digest instead of a path; device and threads are part of the machine."""
    assert sorted(FIELDS) == sorted([*NAMES, *PATHS, *MOVE_NOTHING])
