"""docs/recipe.md matches the code in defaults, learning rates, initial weights, clipping and decay."""

import math
import re
from pathlib import Path

import pytest
from architectures import ROWS

from zero_mpi.config.optimizer import schedule_of
from zero_mpi.config.settings import Config
from zero_mpi.models import ARCHITECTURES
from zero_mpi.optim.optimizer import clip_factor

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipe.md").read_text()
SIZES = {"layers": 3, "dim": 12, "heads": 2, "context": 8, "vocab_size": 20, "tied": False}


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[tuple[str, str]]:
    pairs = re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    return [row for row in pairs if row not in (("flag", "value"), ("s", "rate"))]


def test_the_defaults_are_the_flags():
    table, config = rows(section("Defaults")), Config()
    assert len(table) > 10
    for flag, value in table:
        assert str(getattr(config, flag.strip("`-").replace("-", "_"))) == value, flag


def test_the_rates_of_the_defaults():
    text = section("Learning rate")
    high = float(re.search(r"l = ([0-9.]+) and the other defaults", text)[1])
    rate = schedule_of(Config(lr=high))
    table = [(int(step), float(value)) for step, value in rows(text) if step.isdigit()]
    assert len(table) == 5
    for step, value in table:
        assert rate(step) == pytest.approx(value, rel=1e-4), step


FORMULAS = {
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "linear": lambda x: 1 - x,
    "constant": lambda x: 1,
}


@pytest.mark.parametrize(("name", "f"), FORMULAS.items())
@pytest.mark.parametrize("warmup", [0, 3, 50])
def test_the_formula_of_the_rate(name, f, warmup):
    high, low, steps = 0.3, 0.01, 20
    rate = schedule_of(Config(schedule=name, lr=high, min_lr=low, warmup=warmup, steps=steps))
    for s in range(steps):
        x = (s - warmup) / max(1, steps - warmup)
        expected = high * (s + 1) / warmup if s < warmup else low + (high - low) * f(x)
        assert rate(s) == pytest.approx(expected, rel=1e-12)


WSD = [(0, 20, 5), (3, 20, 17), (0, 1, 1), (4, 30, 1), (3, 9, 0), (12, 9, 0), (10, 200, None)]


@pytest.mark.parametrize(("warmup", "steps", "last"), WSD)
def test_the_formula_of_wsd(warmup, steps, last):
    assert "D = max(W, S - N)" in section("Learning rate")
    high, low, begin = 0.3, 0.01, max(warmup, steps - (steps // 10 if last is None else last))
    flags = {"schedule": "wsd", "warmup": warmup, "steps": steps, "decay_steps": last}
    rate = schedule_of(Config(lr=high, min_lr=low, **flags))
    for s in range(steps):
        x = (s - begin) / max(1, steps - begin)
        after = high if s < begin else low + (high - low) * (1 - x)
        assert rate(s) == pytest.approx(high * (s + 1) / warmup if s < warmup else after, rel=1e-12)


def test_clipping():
    for norm, limit in ((5.0, 1.0), (0.5, 1.0), (1.0, 1.0), (0.0, 2.0)):
        assert clip_factor(norm, limit) == min(1, limit / (norm + 0.000001))
    assert "min(1, c / (n + 0.000001))" in section("Clipping")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_first_weights_and_what_decays(arch):
    for name, param in ARCHITECTURES[arch].from_flags(SIZES | ROWS[arch].needed).params().items():
        assert param.decays == (len(param.shape) > 1), name
        if name.endswith("bias"):
            assert param.init == "zeros", name
        elif "norm" in name:
            assert param.init == "ones", name
        else:
            inward = any(part in name for part in ("attn_output.", "ffn_down"))
            assert (param.init, param.std) == ("normal", 0.02 / (2 * 3) ** 0.5 if inward else 0.02), name
