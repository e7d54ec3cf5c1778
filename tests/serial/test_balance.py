"""Tests of the balance loss and z loss of routers: formulas, gradients, and the loads of experts in a run."""

import json
import math

import numpy as np
import pytest
from test_command_bits import fields, needs_mpiexec, train
from test_resume import refused

from zero_mpi import SerialComm, UsageError
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.config.command_line import parse
from zero_mpi.nn.batch import BatchContext, Documents, Packed
from zero_mpi.nn.experts import BALANCE, RouterLosses, Z, balance
from zero_mpi.sharding.passes import Tallies
from zero_mpi.train.steps import load_figures

LAYERS, TOKENS, EXPERTS, USED = 3, 1030, 5, 2  # TOKENS: more than one chunk
FACTORS = {BALANCE: 0.7, Z: 0.2}


def routed(logits):
    """Return (softmax, chosen experts, start of each expert's rows) of a layer's logits."""
    p = np.exp(logits)
    p /= p.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-p, axis=-1)[:, :USED]
    return p, chosen, np.searchsorted(np.sort(chosen.ravel()), np.arange(EXPERTS + 1))


def reported(layers, factors, documents=None):
    batch = BatchContext(documents, factors)
    for number, logits in enumerate(layers):
        RouterLosses(f"blk.{number}", EXPERTS).report(batch, logits, *routed(logits))
    return batch


def transformers(layers):
    """Compute `load_balancing_loss_func` of transformers 5.24, line by line in NumPy."""
    weights, chosen = (np.concatenate(arrays) for arrays in list(zip(*map(routed, layers), strict=True))[:2])
    mask = np.eye(EXPERTS)[chosen]  # (R, U, N)
    return (mask.mean(axis=0) * weights.mean(axis=0)).sum() * EXPERTS


def test_the_loss_is_that_of_transformers_over_all_layers_and_has_its_slope():
    draw, h = np.random.default_rng(0).standard_normal, 1e-6
    layers, ways = draw((LAYERS, TOKENS, EXPERTS)), draw((LAYERS, TOKENS, EXPERTS))

    def objective(layers):
        squares = sum(np.square(np.log(np.exp(logits).sum(axis=-1))).mean() for logits in layers)
        return FACTORS[BALANCE] * transformers(layers) + FACTORS[Z] * squares

    batch = reported(layers, FACTORS)
    assert balance(batch.sums) == pytest.approx(transformers(layers), rel=1e-12)
    product = 0.0
    for number, (logits, way) in enumerate(zip(layers, ways, strict=True)):
        dlogits = np.zeros_like(logits)
        RouterLosses(f"blk.{number}", EXPERTS).add_gradient(batch, dlogits, logits, routed(logits)[0])
        product += np.vdot(dlogits, way)
    slope = (objective(layers + h * ways) - objective(layers - h * ways)) / (2 * h)
    assert slope == pytest.approx(product, rel=1e-7)


def test_padding_does_not_count():
    """Padding after the last document of a row has id 0; each such position is a document of one token."""
    begins = np.array([[0, 0, 0, 3, 4], [0, 1, 1, 3, 4], [0, 1, 2, 3, 4]])
    ids = np.array([[7, 0, 0, 5, 0], [9, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    documents = Documents(Packed(ids, begins))
    real = np.array([1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0], bool)
    assert documents.counted.tolist() == real.tolist()
    logits = np.random.default_rng(2).standard_normal((LAYERS, real.size, EXPERTS))
    padded, plain = reported(logits, FACTORS, documents), reported(logits[:, real], FACTORS)
    for name, value in plain.sums.items():
        np.testing.assert_allclose(padded.sums[name], value, rtol=1e-12)
    actual, expected = np.zeros_like(logits[0]), np.zeros_like(logits[0][real])
    RouterLosses("blk.0", EXPERTS).add_gradient(padded, actual, logits[0], routed(logits[0])[0])
    RouterLosses("blk.0", EXPERTS).add_gradient(plain, expected, logits[0][real], routed(logits[0][real])[0])
    np.testing.assert_allclose(actual[real], expected, rtol=1e-12)
    assert not actual[~real].any()


def test_the_mean_over_micro_batches_is_told_with_the_loads_of_experts():
    layers = np.random.default_rng(1).standard_normal((2, LAYERS, TOKENS, EXPERTS))
    kinds = {}
    for number in range(LAYERS):
        kinds |= RouterLosses(f"blk.{number}", EXPERTS).tallies()
    tallies = Tallies(kinds)
    for layer in layers:
        tallies.rounds.append(reported(layer, FACTORS).sums)
    sums = tallies.sums(SerialComm())
    assert sums[BALANCE] == pytest.approx(np.mean([transformers(layer) for layer in layers]), rel=1e-12)
    loads = [np.diff(routed(layers[:, n].reshape(-1, EXPERTS))[2]) for n in range(LAYERS)]
    for number, load in enumerate(loads):
        assert sums[f"blk.{number}.expert_load"].tolist() == load.tolist()
    figures, mean = load_figures(sums), 2 * TOKENS * USED / EXPERTS
    assert figures["load_most"] == pytest.approx(np.max(loads) / mean)
    assert figures["load_least"] == pytest.approx(np.min(loads) / mean)
    shares = np.array(loads) / loads[0].sum()
    entropy = -(shares * np.log(shares)).sum(axis=1).mean() / math.log(EXPERTS)
    assert figures["load_entropy"] == pytest.approx(entropy)
    assert load_figures({"blk.0.expert_load": np.array([4.0, 0, 0, 0])}) == {
        "load_least": 0.0,
        "load_most": 4.0,
        "load_entropy": 0.0,
    }
    assert load_figures({}) == {}


FLAGS = "--arch llama --experts 5 --experts-used 2 --expert-ffn 16 --layers 2 --dim 16 --heads 2 --context 16"
FLAGS += (
    " --batch-size 6 --micro-batch 2 --lr 0.05 --warmup 0 --schedule constant --sample 0 --val-fraction 0"
)
NAMES = ("loss", "balance_loss", "z_loss", "load_least", "load_most", "load_entropy")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that trains in a folder and returns the folder."""
    folder = tmp_path_factory.mktemp("routed")
    (folder / "data.txt").write_text("the quick brown fox jumps over the lazy dog. " * 300)

    def job(name, steps, *flags, ranks=1):
        arguments = [*FLAGS.split(), "--steps", str(steps), "--data", str(folder / "data.txt"), *flags]
        train(ranks, folder / name, *arguments)
        return folder / name

    return job


@needs_mpiexec
def test_a_run_tells_its_losses_and_loads_at_any_number_of_ranks_and_goes_on(run):
    strong = ("--balance-loss", "0.5", "--z-loss", "0.01", "--seed", "1")
    serial, parallel = run("alone", 12, *strong), run("together", 8, *strong, ranks=3)
    run("together", 12, *strong, "--recompute", "--strategy", "no-shard", ranks=2)
    figures = fields(serial, *NAMES, "grad_norm")
    assert figures == fields(parallel, *NAMES, "grad_norm")
    weak = fields(run("weak", 12, "--balance-loss", "1e-9", "--seed", "1"), "balance_loss")
    assert float(figures[-1][2]) < float(weak[-1][1]), "the loss has an effect"
    weights = [GGUFFile.open(folder / "latest" / "model.gguf") for folder in (serial, parallel)]
    assert np.array_equal(*(file.tensor("blk.1.ffn_gate_inp.weight") for file in weights))


@needs_mpiexec
def test_the_default_has_a_balance_loss_alone(run):
    record = json.loads((run("default", 1) / "metrics.jsonl").read_text().splitlines()[0])
    assert "balance_loss" in record
    assert "z_loss" not in record
    assert 0 <= record["load_least"] <= 1 <= record["load_most"] <= 5 / 2


@needs_mpiexec
@pytest.mark.parametrize("flag", ["--balance-loss", "--z-loss"])
def test_a_model_without_experts_has_no_such_loss(flag, tmp_path):
    assert f"{flag} 0.01: " in refused(1, tmp_path / "run", flag, "0.01", "--dry-run")
    with pytest.raises(UsageError, match=f"{flag} -1"):
        parse([flag, "-1"])
