"""Tests of distillation from stored predictions: divergence, gradient, files and runs."""

import json

import numpy as np
import pytest
import tiny
from jobs import COMPILED, run_job
from test_command_bits import fields, needs_mpiexec, train_compiled
from test_preference_runs import folder as folder

from zero_mpi import SerialComm
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.commands.evaluate import measure
from zero_mpi.commands.evaluate.command import command
from zero_mpi.data.documents import Document, stream_of
from zero_mpi.data.packing import PackedWindows
from zero_mpi.data.teacher_file import HEAD, TeacherFile, open_teacher
from zero_mpi.errors import JobError, UsageError
from zero_mpi.launch.ending import REQUEUE
from zero_mpi.launch.world import World
from zero_mpi.nn.loss import Distilled

KNOWN = TeacherFile(3, 1.0, 4, 6, "d", "byte")


def records(*rows):
    table = np.zeros(len(rows), KNOWN.record)
    for row, (ids, shares) in enumerate(rows):
        rest = np.log(1 - sum(shares)) if shares else 0
        table[row] = ids, np.log(shares) if shares else 0, rest
    return table


def test_the_divergence_has_a_known_value():
    student = np.log([[0.4, 0.3, 0.05, 0.1, 0.1, 0.05]]).astype(np.float32)
    loss = Distilled(np.array([0]), 1.0, records(([0, 1, 2], [0.5, 0.2, 0.1])), 1.0, 1.0, 6)
    total, slopes = loss.divergence(student, np.array([True]), loss.records)
    assert total == pytest.approx(0.055164761828624655, rel=1e-6)
    others = np.array([0.1, 0.1, 0.05]) * (0.25 - 0.2) / 0.25
    np.testing.assert_allclose(slopes, [[-0.1, 0.1, -0.05, *others]], atol=1e-7)
    assert slopes.sum() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("gap", [10, 16, 18, 20, 24])
def test_a_confident_student_has_finite_differences_as_slopes(gap):
    z = np.random.default_rng(0).standard_normal(400).astype(np.float32) * 0.1
    z[[7, 3, 5]] = gap + 7, gap + 2, gap
    loss = Distilled(np.array([0]), 1.0, records(([3, 7, 5], [0.05, 0.9, 0.049])), 1.0, 1.0, 400)
    total, slopes = loss.divergence(z[None], np.array([True]), loss.records)
    ids, logp, rest = (loss.records[0][name].astype(np.longdouble) for name in ("ids", "logp", "rest"))
    others = np.setdiff1d(np.arange(400), [3, 5, 7])

    def divergence(z):
        shares = np.exp(z - z.max())
        shares /= shares.sum()
        terms = np.exp(logp) * (logp - np.log(shares[ids.astype(int)]))
        return terms.sum() + np.exp(rest) * (rest - np.log(shares[others].sum()))

    def slope(names):
        step = np.zeros(400, np.longdouble)
        step[names] = 1e-5
        return float((divergence(z + step) - divergence(z - step)) / 2e-5)

    assert total[()] == pytest.approx(float(divergence(z.astype(np.longdouble))), rel=1e-5)
    np.testing.assert_allclose(slopes[0, [3, 5, 7]], [slope(i) for i in (3, 5, 7)], atol=2e-6)
    assert slopes[0, others].sum() == pytest.approx(slope(others), rel=1e-4)
    np.testing.assert_allclose(slopes[0, others[:3]], [slope(i) for i in others[:3]], rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_and_gradients_are_those_of_another_program(temperature):
    rng, weight, scale = np.random.default_rng(0), 0.3, 0.1
    module = tiny.make(SerialComm(), tiny.MODELS["llama"])
    x, targets = rng.integers(0, 61, (2, 2, 11))
    targets[0, :4] = -1
    teacher = TeacherFile(5, temperature, 22, 61, "d", "t")
    table, flat = np.zeros(22, teacher.record), targets.ravel()
    for place in range(20):  # the last two positions have no prediction
        table[place] = rng.permutation(61)[:5], np.log(rng.dirichlet(np.ones(6))[:5]), 0
        table[place]["rest"] = np.log(1 - np.exp(table[place]["logp"]).sum())
    z = np.asarray(module.forward(x, training=True), np.float64).reshape(22, 61)

    def softmax(values):
        shares = np.exp(values - values.max(-1, keepdims=True))
        return shares / shares.sum(-1, keepdims=True)

    loss, dz, hard, soft = 0.0, np.zeros_like(z), softmax(z), softmax(z / temperature)
    for n in np.flatnonzero(flat >= 0):
        loss -= (1 - weight) * scale * np.log(hard[n, flat[n]])
        dz[n] += (1 - weight) * scale * (hard[n] - (np.arange(61) == flat[n]))
        if n < 20:
            ids, t, rest = (
                table[n]["ids"],
                np.exp(table[n]["logp"].astype(float)),
                np.exp(float(table[n]["rest"])),
            )
            s, others = soft[n, ids], 1 - soft[n, ids].sum()
            loss += weight * scale * ((t * np.log(t / s)).sum() + rest * np.log(rest / others))
            slope = soft[n] * (others - rest) / others
            slope[ids] = s - t
            dz[n] += weight * scale * slope / temperature
    module.backward(dz.reshape(2, 11, 61).astype(np.float32))
    module.sync_gradients()
    expected = {name: value.copy() for name, value in module.named_gradients()}
    module.zero_gradients()
    actual = module.forward_backward(x, Distilled(targets, scale, table, weight, temperature, 61))
    module.sync_gradients()
    assert actual == pytest.approx(loss, rel=2e-6)
    for name, value in module.named_gradients():
        np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=2e-6, err_msg=name)


def test_tokens_are_found_in_the_data_whatever_is_held_out():
    documents = [Document(str(n), np.arange(10 * n, 10 * n + 4), b"", at=4 * n) for n in range(5)]
    stream = stream_of([documents[n] for n in (0, 1, 3, 4)])
    data = np.concatenate([document.tokens for document in documents])
    windows = PackedWindows(stream, 9)
    places = stream.in_data(windows.places(np.arange(len(windows))))
    batch = windows.batch(np.arange(len(windows)))
    assert ((places < 0) == (batch.targets < 0)).all()
    assert (data[places[places >= 0]] == batch.targets[places >= 0]).all()


def damaged(raw, **changes):
    return json.dumps(json.loads(raw[:HEAD]) | changes).encode().ljust(HEAD) + raw[HEAD:]


HOSTILE = {
    "empty": lambda raw: b"",
    "cut": lambda raw: raw[:-1],
    "long": lambda raw: raw + b"x",
    "no header": lambda raw: b"{" * HEAD + raw[HEAD:],
    "another format": lambda raw: damaged(raw, format="x"),
    "too many ids": lambda raw: damaged(raw, k=7),
    "no number": lambda raw: damaged(raw, k="3"),
    "more tokens": lambda raw: damaged(raw, tokens=1 << 62),
    "no temperature": lambda raw: damaged(raw, temperature=0.0),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_is_not_sound_is_refused(kind, tmp_path):
    path, raw = tmp_path / "t", KNOWN.header() + records(*[([0, 1, 2], [0.5, 0.2, 0.1])] * 4).tobytes()
    path.write_bytes(raw)
    table = open_teacher(str(path)).read(str(path), np.array([1, 2, -1, 0]))
    assert table["ids"].tolist() == [[0, 1, 2], [0, 1, 2], [0, 0, 0], [0, 1, 2]]
    path.write_bytes(HOSTILE[kind](raw))
    with pytest.raises(UsageError, match="--teacher"):
        open_teacher(str(path))


@pytest.mark.parametrize(("name", "value"), [("ids", 6), ("logp", 0.5), ("logp", np.nan), ("rest", np.inf)])
def test_records_that_are_no_predictions_end_a_job(name, value, tmp_path):
    table = records(*[([0, 1, 2], [0.5, 0.2, 0.1])] * 4)
    table[name][2] = value
    (tmp_path / "t").write_bytes(KNOWN.header() + table.tobytes())
    with pytest.raises(JobError, match="--teacher"):
        KNOWN.read(str(tmp_path / "t"), np.array([2]))


@pytest.mark.parametrize(
    "flags",
    [[], ["--context", "29"], ["--stride", "9"], ["--precision", "bf16"], ["--micro-batch", "1"], None],
)
def test_a_file_is_continued_only_with_the_model_and_settings_that_began_it(
    flags, folder, tmp_path, monkeypatch
):
    """The last quarter of an interrupted job's file is missing. A changed record shows if it is used."""
    (tmp_path / "text").write_text("abcab" * 40)
    model, raw = tmp_path / "m.gguf", (folder / "m.gguf").read_bytes()
    model.write_bytes(raw)
    make = [str(model), "--data", str(tmp_path / "text"), "--context", "30", "--top-k-out"]
    with monkeypatch.context() as patch:
        patch.setattr(measure, "finish", lambda *arguments: None)
        assert command(World(0, 1), [*make, str(tmp_path / "t")]) == 0
    part = tmp_path / "t.part"
    begun, size = bytearray(part.read_bytes()), open_teacher(str(part)).record.itemsize
    begun[HEAD + size : HEAD + 2 * size] = begun[HEAD + 2 * size : HEAD + 3 * size]
    begun[len(begun) * 3 // 4 :] = bytes(len(begun) - len(begun) * 3 // 4)
    part.write_bytes(begun)
    if flags is None:
        norm = GGUFFile.open(model).tensor("output_norm.weight")
        model.write_bytes(raw.replace(norm.tobytes(), (2 * norm).tobytes()))
    for name in "tu":
        assert command(World(0, 1), [*make, str(tmp_path / name), *(flags or [])]) == 0
    ours, fresh = ((tmp_path / name).read_bytes()[HEAD:] for name in "tu")
    assert (ours[: 2 * size] == fresh[: 2 * size]) == (flags != [])
    assert ours[2 * size :] == fresh[2 * size :]


@needs_mpiexec
def test_predictions_and_what_is_learned_from_them_are_the_same_on_any_ranks(folder):
    for number, text in enumerate(("abcab" * 30, "bca" * 60, "cabba" * 25)):
        (folder / f"{number}.txt").write_text(text)
    data = ["--data", "0.txt", "1.txt", "2.txt"]
    make = ["-m", "zero_mpi", "evaluate", "m.gguf", *data, "--context", "30", "--top-k", "4"]
    for ranks in (1, 3):
        arguments = [*make, "--top-k-out", f"top-{ranks}"]
        assert run_job(ranks, arguments, env=COMPILED, cwd=folder, timeout=50)[0] == 0
    raw = (folder / "top-1").read_bytes()
    assert (folder / "top-3").read_bytes() == raw
    flags = ["--init", "m.gguf", *data, "--context", "20", "--batch-size", "4", "--micro-batch", "1"]
    flags += ["--val-fraction", "0.3", "--steps", "3", "--sample", "0", "--teacher", "top-1"]
    reference, out = folder / "student-1", folder / "student-3"
    train_compiled(1, reference, *flags)
    first = ["-m", "zero_mpi.train", "--out", str(out), *flags, "--max-time", "0s"]
    assert run_job(3, first, timeout=50, env=COMPILED, cwd=folder)[0] == REQUEUE
    train_compiled(2, out, *flags)
    assert fields(out, "loss", "grad_norm") == fields(reference, "loss", "grad_norm")
    for file in (reference / "latest").iterdir():
        assert (out / "latest" / file.name).read_bytes() == file.read_bytes(), file.name
    status, printed, _ = run_job(1, ["-m", "zero_mpi", "verify", str(out)], env=COMPILED, cwd=folder)
    assert (status, printed.splitlines()[-1][:4]) == (0, "yes:")
    (folder / "0.txt").write_text("another text")
    command = ["-m", "zero_mpi.train", "--out", "no", *flags]
    status, _, errors = run_job(1, command, env=COMPILED, cwd=folder)
    assert (status, len(errors.strip().splitlines())) == (2, 1)
    assert "--teacher" in errors
