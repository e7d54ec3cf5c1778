"""--schedule wsd in whole runs: the recorded rates, other ranks, a stop on the way, and a run made longer."""

import pytest
from test_command_bits import fields, needs_mpiexec, train, write_text

SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16", "--sample", "0"]
SMALL += ["--batch-size", "7", "--micro-batch", "2", "--warmup", "2", "--lr", "0.01", "--min-lr", "0.002"]
SMALL += ["--schedule", "wsd", "--decay-steps", "4"]
pytestmark = needs_mpiexec


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return [*SMALL, "--data", *write_text(tmp_path_factory.mktemp("text"))]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """Nine steps on one rank; the rate falls from the sixth on."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(1, out, *flags, "--steps", "9")
    return out


def test_the_recorded_rates_are_those_of_the_formula(whole):
    rates = [float(rate) for _, rate in fields(whole, "lr")]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.01, 0.01, 0.008, 0.006, 0.004], rel=1e-12)


def test_a_run_made_longer_before_it_decays_is_the_longer_run(whole, flags, tmp_path):
    train(2, tmp_path / "out", *flags, "--steps", "7", "--save-every", "3", "--keep", "0")
    folder = str(tmp_path / "out" / "step-00000003")
    said = train(1, tmp_path / "more", *flags, "--steps", "9", "--resume", folder)
    assert "--steps was 7, now 9" in said
    assert fields(tmp_path / "more") == fields(whole)[3:]
