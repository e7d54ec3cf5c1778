"""Tests of the number of steps: --epochs sets it once the data are known, and a run may be made longer."""

import re
import tomllib

import numpy as np
import pytest
from jobs import status_of
from test_command_bits import assert_same_run, fields, needs_mpiexec, train

from zero_mpi.commands.plan.command import read
from zero_mpi.config.bounds import in_steps
from zero_mpi.config.command_line import parse
from zero_mpi.config.settings import Config
from zero_mpi.data.loader import window_of
from zero_mpi.errors import UsageError

SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16", "--sample", "0"]
SMALL += ["--batch-size", "4", "--micro-batch", "3", "--warmup", "2", "--val-fraction", "0"]


@pytest.mark.parametrize(
    ("epochs", "windows", "batch", "steps"),
    [(1, 10, 5, 2), (1, 11, 5, 3), (3, 10, 4, 8), (2, 3, 100, 1), (7, 1, 1, 7), (1 << 60, 6, 6, 1 << 60)],
)
def test_every_window_is_seen_so_often_and_no_step_is_too_many(epochs, windows, batch, steps):
    config = in_steps(Config(epochs=epochs, batch_size=batch), windows)
    assert (config.steps, config.epochs) == (steps, None)
    assert (steps - 1) * batch < epochs * windows <= steps * batch
    if steps < 100:
        seen = window_of(np.arange(epochs * windows), windows, 0).tolist()
        assert {seen.count(window) for window in range(windows)} == {epochs}


@pytest.mark.parametrize(
    ("wanted", "steps", "warmup"),
    [(None, 440, 40), ("40", 9, 40), ("5%", 60, 3), ("5%", 9, 0), ("2.5%", 1000, 25), ("100%", 7, 7)],
)
def test_a_warm_up_is_a_number_or_a_share_of_the_steps(wanted, steps, warmup):
    assert Config(steps=steps, warmup=wanted).warmup == warmup
    config = Config(epochs=steps, warmup=wanted, batch_size=5)
    assert in_steps(config, 5).warmup == warmup


def test_a_file_of_settings_has_a_warm_up_as_a_share_or_a_number(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('warmup = "5%"\nsteps = 60\n')
    assert parse(["--config", str(path)]).warmup == 3
    path.write_text("warmup = 40\n")  # as version 0.1.0 wrote this setting
    assert parse(["--config", str(path)]).warmup == 40


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--schedule wsd --decay-steps 20 --warmup 6", "--decay-steps 20"),
        ("--trace t.json --trace-steps 30:32", "--trace-steps 30:32"),
    ],
)
def test_flags_that_do_not_fit_the_steps_are_refused_once_these_are_known(flags, expected):
    config = parse([*flags.split(), "--epochs", "1", "--batch-size", "4"])
    with pytest.raises(UsageError, match=rf"^{expected}.*\(--epochs 1 are 25 steps\)$"):
        in_steps(config, 100)
    assert in_steps(config, 400).steps == 100


def test_flags_win_over_the_other_one_in_the_file(tmp_path):
    """A flag overrides the other setting in the file. Both settings in one place are refused."""
    path = tmp_path / "run.toml"
    path.write_text("epochs = 3\n")
    assert (parse(["--config", str(path)]).epochs, parse(["--config", str(path)]).steps) == (3, None)
    config = parse(["--config", str(path), "--steps", "9"])
    assert (config.epochs, config.steps) == (None, 9)
    path.write_text("steps = 440\n")
    config = parse(["--config", str(path), "--epochs", "9"])
    assert (config.epochs, config.steps) == (9, None)
    read(["--config", str(path), "--epochs", "9", "--vocab-size", "300"])  # in `plan` too
    path.write_text("steps = 440\nepochs = 1\n")
    for flags in (["--config", str(path)], ["--steps", "440", "--epochs", "1"]):
        with pytest.raises(UsageError, match=r"--epochs 1: .*--steps 440"):
            parse(flags)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Return flags with a text of 30 windows and a remainder; two epochs are 15 steps."""
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("".join(chr(97 + number * number % 26) for number in range(16 * 30 + 5)))
    return [*SMALL, "--data", str(path)]


@pytest.fixture(scope="module")
def by_steps(flags, tmp_path_factory):
    out = tmp_path_factory.mktemp("steps") / "out"
    train(1, out, *flags, "--steps", "15")
    return out


@needs_mpiexec
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_is_the_run_of_so_many_steps(ranks, flags, by_steps, tmp_path):
    output = train(ranks, tmp_path / "out", *flags, "--epochs", "2")
    assert re.search("steps: +15, 2.0 epochs; .* 0.004 after 2 ", output)
    assert_same_run(tmp_path / "out", by_steps)
    assert fields(tmp_path / "out", "lr") == fields(by_steps, "lr")
    settings = tomllib.loads((tmp_path / "out" / "config.toml").read_text())
    assert settings["steps"] == 15
    assert "epochs" not in settings
    status = status_of(tmp_path / "out")
    assert (status["step"], status["steps"]) == (15, 15)


@needs_mpiexec
def test_a_run_made_longer_before_it_decays_is_the_longer_run(flags, tmp_path):
    flags = [*flags, "--lr", "0.01", "--min-lr", "0.002", "--schedule", "wsd", "--decay-steps", "4"]
    train(1, tmp_path / "whole", *flags, "--steps", "9")
    train(2, tmp_path / "out", *flags, "--steps", "7", "--save-every", "3", "--keep", "0")
    folder = str(tmp_path / "out" / "step-00000003")
    output = train(1, tmp_path / "more", *flags, "--steps", "9", "--resume", folder)
    assert "--steps was 7, now 9" in output
    assert fields(tmp_path / "more") == fields(tmp_path / "whole")[3:]
