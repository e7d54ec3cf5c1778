"""`--audit` as a user sees it: one line, the exit status, events, and the bytes of a run that was healed."""

import json
import re

import numpy as np
import pytest
from audited_job import FLAGS, write_script
from jobs import run_job
from test_command_bits import SIZES, needs_mpiexec, write_text

from zero_mpi.sharding import witness
from zero_mpi.sharding.witness import digest


def run(folder, *more, fault=True):
    """(status, what was printed, said on stderr) of an audited run of three ranks."""
    script = write_script(folder, fault)
    out = ["--out", str(folder / "out")]
    return run_job(3, [str(script), *SIZES, *FLAGS, *out, "--data", *write_text(folder), *more], cwd=folder)


def events(folder):
    """The warnings."""
    lines = map(json.loads, (folder / "out" / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == "warning"]


def computed(folder):
    """How many micro-batches each rank has trained on or computed again."""
    return [int((folder / f"computed-{rank}").read_text()) for rank in range(3)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The model of a run without a fault, what it printed, and what its ranks have computed."""
    folder = tmp_path_factory.mktemp("sound")
    status, printed, errors = run(folder, "--audit", "2", fault=False)
    assert (status, errors) == (0, "")
    return (folder / "out" / "latest" / "model.gguf").read_bytes(), printed, computed(folder)


@needs_mpiexec
def test_an_audit_says_what_it_costs_and_changes_no_bit(sound, tmp_path):
    assert "audit:     every 2 steps one of 2 rounds is computed again, 25.00% of all" in sound[1]
    status, _, _ = run(tmp_path, fault=False)
    assert status == 0
    # Twelve rounds and three more; rank 2 has nothing in half of the twelve. Rank 0 has planned by computing.
    plain = computed(tmp_path)
    assert (plain[1:], sound[2][1:]) == ([12, 6], [15, 9])
    assert sound[2][0] - plain[0] == 3 == 0.25 * plain[1]
    assert (tmp_path / "out" / "latest" / "model.gguf").read_bytes() == sound[0]


@needs_mpiexec
def test_a_rank_that_was_wrong_ends_the_run_by_one_line(tmp_path):
    status, _, errors = run(tmp_path, "--audit", "2")
    assert status == 1
    (line,) = [line for line in errors.splitlines() if line.startswith("zero_mpi")]
    wanted = r"zero_mpi train: error: step 4, micro-batch [14]: rank 1 on (\S+) computed \S+ wrongly "
    assert re.match(wanted + r"\(ranks 2 and 0 agree\); checkpoints of earlier steps hold", line)
    assert "Traceback" not in errors
    assert (tmp_path / "out" / "latest").resolve().name == "step-00000002"
    said = json.loads((tmp_path / "out" / "status.json").read_text())
    assert said["state"] == "failed"
    assert said["reason"].startswith("step 4, micro-batch")


@needs_mpiexec
def test_a_run_that_heals_ends_with_the_bytes_of_one_without_a_fault(sound, tmp_path):
    status, printed, errors = run(tmp_path, "--audit", "2", "--audit-action", "heal")
    assert (status, errors) == (0, "")
    assert printed.count("; the step is computed again") == 1
    assert (tmp_path / "out" / "latest" / "model.gguf").read_bytes() == sound[0]
    (warned,) = events(tmp_path)
    assert (warned["rank"], warned["step"]) == (1, 3)


@needs_mpiexec
def test_a_warning_goes_on(sound, tmp_path):
    status, printed, errors = run(tmp_path, "--audit", "2", "--audit-action", "warn")
    assert (status, errors) == (0, "")
    assert printed.count("rank 1 on ") == 1
    assert (tmp_path / "out" / "latest" / "model.gguf").read_bytes() != sound[0]
    assert len(events(tmp_path)) == 1


# digests


def test_a_digest_covers_every_bit(monkeypatch):
    monkeypatch.setattr(witness, "WORDS", 4)
    array = np.random.default_rng(0).standard_normal(43).astype(np.float32)
    before, seen = digest([array]), set()
    words = array.view(np.uint32)
    for place in range(words.size):
        for bit in range(32):
            words[place] ^= np.uint32(1 << bit)
            seen.add(digest([array]))
            words[place] ^= np.uint32(1 << bit)
    assert before not in seen
    assert len(seen) == 64 * 4 + 32 * 3, "five rows of four words are folded, three words of 32 bits are not"
    assert digest([array]) == before
    assert digest([array[:40], array[40:]]) != before
    assert digest([array[:0]]) != digest([])
