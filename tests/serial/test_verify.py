"""`zero-mpi verify` confirms unchanged runs on any ranks and names the first difference of changed runs."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import run_job
from patched import train_with
from test_command_bits import needs_mpiexec, train, write_text

from zero_mpi.checkpoint.gguf.header import pack_file
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import (
    DIGESTS,
    ID,
    MODEL,
    STATE_DIGEST,
    TENSOR_DIGESTS,
    as_lines,
    digest,
    digest_of_files,
    from_lines,
    signature,
)
from zero_mpi.commands.verify.command import INCOMPLETE, command
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World
from zero_mpi.telemetry.proof import BITS, FIRST, digest_after, read_proof

SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--kv-heads", "1", "--ffn", "17", "--context", "16"]
SMALL += ["--batch-size", "7", "--micro-batch", "2", "--warmup", "2", "--sample", "0", "--device", "cpu"]
OFTEN = ["--steps", "6", "--save-every", "2", "--eval-every", "3", "--eval-windows", "4"]
pytestmark = needs_mpiexec
Verify = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train six steps on three ranks over messages, with checkpoints of steps 2, 4 and 6."""
    out = tmp_path_factory.mktemp("whole") / "out"
    options = ["--strategy", "no-shard", "--transport", "mpi"]
    train(3, out, *SMALL, *OFTEN, *options, "--data", *text)
    return out


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))


@pytest.fixture
def verify(capfd: pytest.CaptureFixture[str]) -> Verify:
    """Verify in this process, where no step is to be recomputed; return the exit status and the lines."""

    def run_it(*arguments: object) -> tuple[int, list[str]]:
        capfd.readouterr()
        status = command(World(0, 1), [*map(str, arguments), "--timeout", "0"])
        return status, capfd.readouterr().out.splitlines()

    return run_it


def compute(run: Path, *arguments: object, ranks: int = 1) -> tuple[int, list[str]]:
    """Verify in a job with the operations of the runs; return the exit status and the lines."""
    job = ["-m", "zero_mpi", "verify", str(run), *map(str, arguments)]
    status, printed, errors = run_job(ranks, job, timeout=50)
    assert "error" not in errors, errors
    return status, printed.splitlines()


def assert_yes(run: Path, *arguments: object) -> list[str]:
    """Verify all steps in a job on one rank; return the segments that it names."""
    status, lines = compute(run, *arguments)
    assert status == 0, lines
    assert "steps 1-6 have the same bits" in lines[-1]
    return segments(lines)


def segments(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines if line.startswith("steps ")]


def content(folder: Path) -> dict[str, Any]:
    return {
        str(path): os.readlink(path) if path.is_symlink() else (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def head(run: Path) -> str:
    return list(read_proof(run / "proof.jsonl"))[-1].head


# ------------------------------------------------------------------------------------------- unchanged runs

UNCACHED = """
from zero_mpi.data import encoded_cache
from zero_mpi.commands.verify.command import main

def cached(*arguments):
    raise AssertionError("the cache is read")

encoded_cache.LEAST, encoded_cache.load_entry = 0, cached
main()
"""


def test_no_cache_is_read(whole, tmp_path):
    """`verify` encodes the text again, because a faulty cache would affect run and verification equally."""
    script = tmp_path / "uncached.py"
    script.write_text(UNCACHED)
    status, _, errors = run_job(1, [str(script), str(whole)], timeout=50)
    assert status == 0, errors


def test_the_chain_is_the_same_at_any_number_of_ranks_and_the_run_prints_its_head(whole, text, tmp_path):
    printed = train(1, tmp_path / "out", *SMALL, *OFTEN, "--data", *text)
    assert (tmp_path / "out" / "proof.jsonl").read_bytes() == (whole / "proof.jsonl").read_bytes()
    assert f"proof: {head(whole)}" in printed.splitlines()


def test_the_head_depends_on_no_checkpoint(whole, text, tmp_path):
    """The chain's head is the same if a run saves in the background, at other steps, or after a signal."""
    stops = "if (rank, done) == (0, 2): os.kill(os.getpid(), signal.SIGTERM)"
    script = train_with(tmp_path / "stops.py", stops, method="rounds")
    flags = [*SMALL, *OFTEN, "--save-every", "5", "--async-save", "--data", *text]
    out = tmp_path / "out"
    assert run_job(2, [script, "--out", str(out), *flags])[0] == 75
    train(1, out, *flags)
    assert sorted(path.name[-1] for path in out.glob("step-*")) == ["3", "5", "6"]
    assert head(out) == head(whole)
    named = assert_yes(out, "--expect", head(whole))
    assert named == ["steps 1 to 3", "steps 4 to 5", "steps 6 to 6"]


def as_0_1_0(run: Path) -> str:
    """Write the chain as 0.1.0 did, before --bits existed. Return its head."""

    def alter(entry: dict[str, Any]) -> None:
        if "saved" in entry:
            entry["checkpoint"] = entry.pop("saved")
        if "run" in entry:
            del entry["run"]["settings"]["bits"]

    sign(run, alter)
    return head(run)


def test_a_run_of_0_1_0_is_verified_held_to_its_head_and_gone_on_with(run, whole, text):
    old = as_0_1_0(run)
    assert old != head(whole)
    assert_yes(run, "--expect", old)
    shutil.rmtree(run / "step-00000006")
    rows_of(run / "proof.jsonl", lambda rows: rows[:8])
    before = (run / "proof.jsonl").read_bytes()
    train(2, run, *SMALL, *OFTEN, "--data", *text)
    assert (run / "proof.jsonl").read_bytes().startswith(b"".join(before.splitlines(keepends=True)[:7]))
    assert_yes(run)


def test_yes_on_one_rank(whole):
    """The output names each segment, the folder does not change, and the published head matches."""
    before = content(whole)
    status, lines = compute(whole, "--expect", head(whole), "--strategy", "full-shard", "--transport", "auto")
    assert status == 0
    assert lines[0] == f"chain: complete, proof {head(whole)}"
    assert re.match("files: .* 3 checkpoints", lines[1])
    assert segments(lines[2:5]) == ["steps 1 to 2", "steps 3 to 4", "steps 5 to 6"]
    assert re.match("yes: .*; steps 1-6 have the same bits, .* 1 rank$", lines[5])
    assert content(whole) == before


def test_yes_and_no_on_other_ranks_strategies_and_transports(run):
    ranks, flags = 2, ["--transport", "shared", "--strategy", "shard-grad-op", "--prefetch", "0"]
    status, lines = compute(run, *flags, ranks=ranks)
    assert status == 0, lines
    assert re.match(f"yes: .* steps 1-6 have the same bits, .* {ranks} ranks$", lines[-1])
    forge_record(run, 4)
    status, lines = compute(run, *flags, ranks=ranks)
    assert status == 1
    assert lines[-1].startswith("no: step 4: loss is 4.25 in the records, ")
    assert not any("3 to 4" in line for line in lines), "a segment that differs is called equal"


def test_a_resume_on_other_ranks_leaves_the_chain_of_the_unbroken_run(run, whole, text):
    """A job was killed after step 3: both files end in half a line, and the checkpoint is of step 2."""
    for step in (4, 6):
        shutil.rmtree(run / f"step-{step:08d}")
    (run / "latest").unlink()
    (run / "latest").symlink_to("step-00000002")
    for name, lines in (("metrics.jsonl", 3), ("proof.jsonl", 5)):
        rows = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(b"".join(rows[:lines]) + rows[lines][:40])
    (run / "status.json").write_text('{"state": "running"}')
    status, lines = compute(run)
    assert status == 0
    assert any(re.match("note: the last line of proof.jsonl is cut off", line) for line in lines)
    assert re.match("yes: .*; steps 1-3 have the same bits", lines[-1])
    train(2, run, *SMALL, *OFTEN, "--data", *text)
    assert (run / "proof.jsonl").read_bytes() == (whole / "proof.jsonl").read_bytes()


def test_a_run_goes_on_with_other_settings_each_job_is_computed_with_its_own(text, tmp_path):
    """The chain has both jobs: a cosine over 3 steps, then a cosine over 5 with another rate."""
    out = tmp_path / "out"
    flags = [*SMALL, "--save-every", "3", "--eval-windows", "4", "--data", *text]
    train(2, out, *flags, "--steps", "3")
    train(1, out, *flags, "--steps", "5", "--lr", "1e-3")
    status, lines = compute(out)
    assert status == 0, lines
    assert segments(lines) == ["steps 1 to 3", "steps 4 to 5"]
    shutil.rmtree(out / "step-00000003")
    status, lines = compute(out)
    assert status == 3, lines
    assert any(line.startswith("note: 1 of 2 checkpoints ") for line in lines)
    assert lines[-1].startswith("incomplete: ")
    assert "; steps 4-5 cannot be" in lines[-1]
    assert compute(out, "--to", 3)[0] == 0


OTHERS = {
    "keep": ["--keep", "1"],
    "low precision and an average": ["--precision", "bf16", "--ema", "0.9"],
    "parallel, patience": ["--checkpoint-io", "parallel", "--patience", "2"],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_yes_for_runs_of_other_kinds(kind, text, tmp_path):
    """--keep 1 leaves only the last checkpoint, so one segment leads to it from the initial weights."""
    train(2, tmp_path / "out", *SMALL, *OFTEN, *OTHERS[kind], "--data", *text)
    assert len(assert_yes(tmp_path / "out")) == (1 if kind == "keep" else 3)


def test_data_may_lie_elsewhere_now(run, text, tmp_path, verify):
    copies = [shutil.copy(path, tmp_path) for path in text]
    replace_in(run / "config.toml", str(Path(text[0]).parent), "/nowhere")
    with pytest.raises(UsageError, match="/nowhere"):
        verify(run)
    assert compute(run, "--data", *copies, "--from", 4)[0] == 0


# --------------------------------------------------------------------------------------------- changed runs


def change(path: Path, place: int, **values: object) -> None:
    rows = path.read_text().splitlines()
    rows[place] = json.dumps(json.loads(rows[place]) | values)
    path.write_text("".join(f"{row}\n" for row in rows))


def replace_in(path: Path, old: str, new: str) -> None:
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new))


def rows_of(path: Path, order: Callable[[list[bytes]], list[bytes]]) -> None:
    path.write_bytes(b"".join(order(path.read_bytes().splitlines(keepends=True))))


def flip(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[-place] ^= 16
    path.write_bytes(raw)


def sign(run: Path, alter: Callable[[dict[str, Any]], None]) -> None:
    """Change lines of the chain and recompute its digests, as a forger would."""
    before, lines = FIRST, ""
    for raw in (run / "proof.jsonl").read_text().splitlines():
        entry = json.loads(raw)
        del entry["chain"]
        alter(entry)
        body = json.dumps(entry)
        digest = digest_after(before, body.encode())
        lines += f'{body[:-1]}, "chain": "{digest}"}}\n'
        before = before if "saved" in entry else digest
    (run / "proof.jsonl").write_text(lines)


def forge_record(run: Path, step: int) -> None:
    """Change the loss of a step in both files and sign the chain."""
    change(run / "metrics.jsonl", step - 1, loss=4.25)
    sign(
        run,
        lambda entry: (
            entry["record"].update(loss=4.25) if entry["step"] == step and "record" in entry else None
        ),
    )


def forge_model(run: Path, step: int) -> None:
    """Change a weight in a checkpoint and sign its files and the chain as the writer does."""
    folder = run / f"step-{step:08d}"
    files = {name: GGUFFile.open(folder / name) for name in ("model.gguf", "optimizer.gguf")}
    keys = {name: dict(file.metadata) for name, file in files.items()}
    model, state = keys.values()
    arrays = {name: np.array(files["model.gguf"].tensor(name)) for name in files["model.gguf"].tensors}
    arrays["blk.0.ffn_up.weight"].flat[7] += 0.5
    lines = as_lines({name: digest(array) for name, array in arrays.items()})
    model[TENSOR_DIGESTS] = state[DIGESTS[MODEL]] = lines
    digests = {MODEL: from_lines(lines), "optimizer": from_lines(state[TENSOR_DIGESTS])}
    model[STATE_DIGEST] = state[STATE_DIGEST] = digest_of_files(digests)
    model[ID] = state[ID] = signature(model, state)
    raw = {name: path.read_bytes() for name in files if (path := folder / name)}
    for name, metadata in keys.items():
        table = [(spec.name, spec.shape) for spec in files[name].tensors.values()]
        header, _, _ = pack_file(metadata["general.architecture"], metadata, table)
        raw[name] = header + raw[name][len(header) :]
        if name == "model.gguf":
            raw[name] = header + b"".join(a.tobytes() + bytes(-a.nbytes % 32) for a in arrays.values())
        (folder / name).write_bytes(raw[name])
    sign(
        run,
        lambda entry: (
            entry["saved"].update(id=state[ID], state=state[STATE_DIGEST])
            if entry["step"] == step and "saved" in entry
            else None
        ),
    )


def other_seed(run: Path) -> None:
    replace_in(run / "config.toml", "seed = 0", "seed = 1")


P, M = "proof.jsonl", "metrics.jsonl"


def lines(name: str, order: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], object]:
    """Return a function that damages a run by changing the lines of a file."""
    return lambda run: rows_of(run / name, order)


def bit(name: str) -> Callable[[Path], object]:
    """Return a function that flips one bit of a file."""
    return lambda run: flip(run / name, 900)


def both_seeds(run: Path) -> None:
    other_seed(run)
    sign(run, lambda entry: "run" in entry and entry["run"]["settings"].update(seed=1))


def third(**values: object) -> Callable[[Path], object]:
    """Return a function that damages the record of step 3."""
    return lambda run: change(run / M, 2, **values)


SEVENTH = lines(M, lambda rows: [*rows, rows[-1].replace(b'"step": 6', b'"step": 7')])
MIXED = lines(P, lambda rows: [*rows[:4], rows[5], rows[4], *rows[6:]])
DOCTORED: dict[str, tuple[Callable[[Path], object], str]] = {
    "model": (bit("step-00000004/model.gguf"), "step-00000004/model.gguf: tensor 'output.weight' "),
    "moments": (bit("step-00000002/optimizer.gguf"), "tensor 'optimizer.adam.second_moments.output.weight' "),
    "checkpoint of another step": (
        lambda run: shutil.copytree(run / "step-00000002", run / "step-00000004", dirs_exist_ok=True),
        "proof.jsonl, line 7: the checkpoint of step 4 has the id '",
    ),
    "loss": (third(loss=1.5), "proof.jsonl, line 5: step 3: metrics.jsonl has loss 1.5"),
    "held-out loss": (third(val_loss=1.5), "line 5: step 3: metrics.jsonl has val_loss 1.5, the chain "),
    "record removed": (lines(M, lambda rows: [*rows[:3], *rows[4:]]), "line 6: expected a record of step 4"),
    "records cut off": (lines(M, lambda rows: rows[:5]), "proof.jsonl, line 9: expected a record of step 6"),
    "record appended": (SEVENTH, "metrics.jsonl has a record of step 7 after the last step in proof.jsonl"),
    "chain cut off": (lines(P, lambda rows: rows[:6]), "metrics.jsonl has a record of step 5 after the last"),
    "last line cut off": (lines(P, lambda rows: rows[:-1]), "latest names step-00000006"),
    "half a line": (lines(P, lambda rows: [*rows[:-1], rows[-1][:50]]), "line 10: "),
    "no line": (lines(P, lambda rows: []), "proof.jsonl has no line"),
    "line removed": (lines(P, lambda rows: [*rows[:4], *rows[5:]]), "proof.jsonl, line 5: "),
    "lines exchanged": (MIXED, "proof.jsonl, line 5: "),
    "line appended": (lines(P, lambda rows: [*rows, rows[-1]]), "line 11: a checkpoint of step 6"),
    "seed": (other_seed, "--seed is 1 in config.toml, and 0 in the chain in proof.jsonl"),
    "rate": (lambda run: replace_in(run / "config.toml", "lr = 0.004", "lr = 0.005"), "--lr is 0.005 "),
    "seed, signed": (both_seeds, "--seed is 0 in the checkpoint of step 2, and 1 in the chain"),
    "loss, signed": (lambda run: forge_record(run, 4), "step 4: loss is 4.25 in the records, "),
    "model, signed": (lambda run: forge_model(run, 4), "step 4: element 7 of blk.0.ffn_up.weight is "),
}


@pytest.mark.parametrize("what", DOCTORED)
def test_what_was_doctored_is_named(what, run, verify):
    spoil, expected = DOCTORED[what]
    spoil(run)
    status, lines = (compute if what.endswith(", signed") else verify)(run)
    assert status == 1
    assert lines[-1].startswith("no: ")
    assert expected in lines[-1], lines[-1]
    assert not any(line.startswith("yes") for line in lines)


def test_other_data_are_named(run, text, tmp_path):
    copies = [shutil.copy(path, tmp_path) for path in text]
    flip(Path(copies[2]), 8)
    status, lines = compute(run, "--data", *copies)
    assert status == 1
    assert lines[-1].startswith("no: ")
    assert "--val-data" in lines[-1]
    assert "and '" in lines[-1]


def test_another_head_than_the_published_one_is_named(run, verify):
    """If all files are forged, the head still differs from the published head."""
    published = head(run)
    forge_record(run, 4)
    assert verify(run, "--expect", published)[1][-1] == (
        f"no: proof.jsonl ends in {head(run)}, expected {published}"
    )


def test_the_head_may_be_spelled_in_capitals_and_must_be_a_digest(run, verify):
    assert verify(run, "--sample", 0, "--expect", f" {head(run).upper()}\n")[0] == INCOMPLETE
    for text in ("", "00", head(run)[1:] + "g", head(run) + "0"):
        with pytest.raises(UsageError, match="--expect"):
            verify(run, "--expect", text)


# --------------------------------------------------------------------------------------- selected segments


def test_parts_are_whole_stretches_and_a_sample_is_drawn_by_its_seed(run):
    lines = compute(run, "--from", 3, "--to", 4)[1]
    assert lines[2].startswith("from step 2 to step 4")
    assert re.search("steps 3-4 have the same bits, .* 1 rank$", lines[-1])
    lines = compute(run, "--sample", 2, "--seed", 5)[1]
    assert re.match("sample: 2 of 3 .*--seed 5$", lines[2])
    assert len(segments(lines)) == 2


def invent(run: Path) -> None:
    """Write invented records and a chain that begins at a missing checkpoint."""
    rows = [json.loads(row) for row in (run / "proof.jsonl").read_text().splitlines()]
    for path in run.glob("step-*"):
        shutil.rmtree(path)
    (run / "latest").unlink()
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    invented = [{"step": 100, "run": {**rows[0]["run"], "from": "ab" * 16}}]
    invented += [{"step": step, "record": {"loss": 1 / step}} for step in range(101, 109)]
    (run / "proof.jsonl").write_text("".join(f"{json.dumps({**row, 'chain': ''})}\n" for row in invented))
    sign(run, lambda entry: None)
    left = {key: value for key, value in record.items() if key not in BITS}
    entries = [left | {"step": step, "loss": 1 / step} for step in range(101, 109)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in entries))


def fast(run: Path) -> None:
    replace_in(run / "config.toml", 'reduction = "exact"', 'reduction = "fast"')
    sign(run, lambda entry: "run" in entry and entry["run"]["settings"].update(reduction="fast"))


NOT_COMPUTED: dict[str, tuple[Callable[[Path], object], list[object]]] = {
    "invented": (invent, []),
    "no sample": (lambda run: None, ["--sample", 0]),
    "fast": (fast, []),
    "no such steps": (invent, ["--from", 101, "--to", 104]),
}


@pytest.mark.parametrize("what", NOT_COMPUTED)
def test_what_was_not_computed_is_no_yes(what, run, verify):
    alter, flags = NOT_COMPUTED[what]
    alter(run)
    status, lines = verify(run, *flags)
    assert status == 3
    assert lines[-1].startswith("incomplete: ")
    assert "no step was " in lines[-1]


def test_steps_that_the_run_has_not_made_are_no_yes(run):
    status, lines = compute(run, "--from", 4, "--to", 9)
    assert status == 3
    assert "steps 5-6 have the same bits" in lines[-1]
    assert "steps 7-9 cannot be" in lines[-1]


def test_what_is_no_run_folder_is_bad_usage(run, tmp_path, verify):
    with pytest.raises(UsageError, match=r"--out .*config.toml"):
        verify(tmp_path)
    for flag, value in (("--sample", -1), ("--from", -2), ("--to", -3)):
        with pytest.raises(UsageError, match=f"^{flag} {value}: expected at least 0$"):
            verify(run, flag, value)
    with pytest.raises(UsageError, match="--from 6 --to 6: "):
        verify(run, "--from", 6)
    with pytest.raises(UsageError, match=r"^--seed 4294967296: .* at least 0 and less than 4294967296$"):
        verify(run, "--seed", 1 << 32)
    (run / "proof.jsonl").unlink()
    with pytest.raises(UsageError, match=r"proof\.jsonl"):
        verify(run)
