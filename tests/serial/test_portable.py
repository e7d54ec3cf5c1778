"""`--bits portable`: the package's functions replace library functions, and libraries are pinned at load."""

import ast
import platform
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from jobs import COMPILED, clean_environment, launcher, run_command, run_job
from test_command_bits import needs_mpiexec, write_text
from test_consistency import FLAGS, RUN

from zero_mpi.config.command_line import parse
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.ops import elementary

PACKAGE = Path(portable.__file__).parents[1]
ROOT = PACKAGE.parent
PINNED = COMPILED | {portable.VARIABLE: portable.PORTABLE}
TEXT = {"capture_output": True, "text": True, "check": False}
fitting = pytest.mark.skipif(
    bool(portable.unfit(platform.machine(), portable.environment.of_processor("flags"))),
    reason=f"this processor is not {portable.LEVEL}",
)


def ulps(actual, exact):
    """Return the largest error in units of the last place; `exact` has more bits than float64."""
    place = np.spacing(np.abs(exact.astype(actual.dtype))).astype(np.longdouble)
    return float((np.abs(actual.astype(np.longdouble) - exact) / place).max())


def many_positive():
    draw = np.random.default_rng(1)
    sizes = np.ldexp(draw.uniform(1, 2, 100000), draw.integers(-1074, 1023, 100000))
    return np.concatenate([sizes, draw.uniform(0.5, 2, 100000), 1 + draw.uniform(-1, 1, 10000) * 1e-6])


def test_logarithms_are_right_to_the_last_place():
    x = many_positive()
    assert ulps(elementary.log_of_array(x), np.log(x.astype(np.longdouble))) < 1
    assert elementary.decimal_log(7.5) == float(Decimal("7.5").ln())
    with pytest.raises(ValueError, match="expected a number above 0"):
        elementary.decimal_log(0.0)


def test_exponentials_are_right_to_two_places():
    x = -np.random.default_rng(3).exponential(30, 200000)
    assert ulps(elementary.exp_of_array(x), np.exp(x.astype(np.longdouble))) < 2
    odd = np.array([0.0, -0.0, -744.0, -1e9, -np.inf])
    np.testing.assert_allclose(elementary.exp_of_array(odd), np.exp(odd), rtol=0, atol=1e-323)


def test_cosines_and_sines_are_right_over_long_contexts():
    draw = np.random.default_rng(2)
    x = np.concatenate([draw.uniform(-10, 10, 50000), draw.uniform(-1e6, 1e6, 50000), np.arange(1e5)])
    for function, library in ((elementary.sine_of_array, np.sin), (elementary.cosine_of_array, np.cos)):
        exact = library(x.astype(np.longdouble))
        assert np.abs(function(x) - exact).max() < 2.0**-52
        assert (function(x).astype(np.float32) == exact.astype(np.float32)).mean() > 0.9999
    assert elementary.cosine_of_number(0.0) == 1.0
    assert (elementary.sine_of_array(np.zeros(1)) == 0).all()
    with pytest.raises(AssertionError, match="a larger angle"):
        elementary.cosine_of_array(np.array([2.0**21]))


def test_powers_are_rounded_once():
    exponents = -np.arange(0, 64, 2) / 64
    powers = elementary.power_by_decimal(10000.0, exponents)
    assert ulps(powers, np.longdouble(10000) ** exponents.astype(np.longdouble)) < 0.51
    assert elementary.power_by_decimal(0.5, 3) == 0.125
    for x, y, expected in ((0.0, 3, 0.0), (0.0, 0, 1.0), (0.9, 0, 1.0), (0.999, 10**7, 0.0)):
        assert elementary.power_by_decimal(x, y) == expected


def test_normal_numbers_are_normal():
    draws = elementary.normals_by_turns(np.random.Generator(np.random.Philox(key=3)), 1 << 18)
    assert draws.dtype == np.float32
    assert np.isfinite(draws).all()
    moments = [float((draws.astype(np.float64) ** n).mean()) for n in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.03)
    assert 4.2 < np.abs(draws).max() < 6.5
    assert abs(float((draws[::2] * draws[1::2]).mean())) < 0.01  # the two numbers of a pair are uncorrelated


@pytest.mark.timeout_seconds(300)
def test_functions_of_kernels_are_right_and_pass_on_what_is_not_finite():
    jit = pytest.importorskip("zero_mpi.ops.cpu.jit")
    x = many_positive()[::7]
    actual = np.array([jit.portable_log(value) for value in x])
    assert ulps(actual, np.log(x.astype(np.longdouble))) < 1
    single = x[(x > 1e-44) & (x < 3e38)].astype(np.float32)
    actual = np.array([jit.portable_log_single(value) for value in single], np.float32)
    assert ulps(actual, np.log(single.astype(np.longdouble))) < 0.51
    odd = [np.inf, np.nan, 0.0, -0.0, -1.0, -np.inf]
    expected = [np.inf, np.nan, -np.inf, -np.inf, np.nan, np.nan]
    for log in (jit.portable_log, jit.portable_log_single):
        np.testing.assert_array_equal([log(np.float32(value)) for value in odd], np.array(expected))


@pytest.mark.timeout_seconds(300)
def test_the_exponential_of_kernels_is_right_to_two_places():
    jit = pytest.importorskip("zero_mpi.ops.cpu.jit")
    import numba

    @numba.njit(fastmath=jit.LIBERTIES, error_model="numpy")
    def over(x, out):
        for i in range(x.size):
            out[i] = jit.exponential(x[i])

    x = np.linspace(-87.3, 88.2, 2_000_001, dtype=np.float32)
    odd = np.array([-200, -np.inf, 89, np.inf, np.nan, 0, -0.0, 1e-40], np.float32)
    out, at_odd = np.zeros_like(x), np.zeros_like(odd)
    over(x, out)
    over(odd, at_odd)
    assert ulps(out, np.exp(x.astype(np.longdouble))) < 2
    np.testing.assert_array_equal(at_odd, np.array([0, 0, np.inf, np.inf, np.nan, 1, 1, 1], np.float32))


# Modules that compute in training. `ops.reference` is left out, because float32 uses kernels.
OF_TRAINING = ("ops/cpu", "nn", "models", "sharding", "checkpoint/huggingface", "ops/flat_reference.py")
OF_TRAINING += ("config/optimizer.py", "train/trainer.py", "device/ordered_sum.py")
OF_LIBRARIES = {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "sinh"}
OF_LIBRARIES |= {"cosh", "atan", "arctan", "atan2", "arctan2", "pow", "power", "float_power", "hypot", "cbrt"}
OF_LIBRARIES |= {"erf", "gamma", "lgamma", "sigmoid", "standard_normal", "normal", "exponential", "logaddexp"}


def is_constant(node):
    return isinstance(node, ast.Constant | ast.UnaryOp)


def of_libraries(path):
    """Yield uses of functions whose last bit depends on a library, and powers with varying exponents."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in OF_LIBRARIES:
            if isinstance(node.value, ast.Name) and node.value.id in ("np", "math", "xp", "generator"):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value.id}.{node.attr}"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not is_constant(node.right):
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


# Only these places may use library functions, for native bits.
CHOSEN = {"ops/cpu/jit.py: np.log"}


def test_what_trains_takes_no_function_from_a_library():
    places = [PACKAGE / name for name in OF_TRAINING]
    files = [path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place])]
    calls = [text for path in files for text in of_libraries(path)]
    calls = [text for text in calls if f"{text.split(':')[0]}: {text.split()[-1]}" not in CHOSEN]
    assert not calls, "use ops.elementary; in kernels, use ops.cpu.jit"


def test_other_processors_are_refused():
    assert portable.unfit("x86_64", " ".join(portable.MUST_HAVE)) == portable.unfit("x86_64", "") == ""
    assert portable.unfit("x86_64", "avx f16c").endswith("lacks avx2, bmi1, bmi2, fma, movbe, abm")
    assert "aarch64" in portable.unfit("aarch64", "asimd")


def test_the_variable_stands_for_the_flag(monkeypatch):
    assert parse([]).bits == "native"
    assert parse([]).fixed()["bits"] == "native"
    monkeypatch.setenv(portable.VARIABLE, "portable")
    assert parse([]).bits == "portable"
    monkeypatch.setenv(portable.VARIABLE, "some")
    with pytest.raises(UsageError, match=r"^--bits some: .*native, portable"):
        parse([])


# Settings that simulate another host: kernels, caches, target, and a C library without FMA.
OTHER_HOST = {
    "OPENBLAS_CORETYPE": "Nehalem",
    "OPENBLAS_L2_SIZE": "2048",
    "NUMBA_CPU_NAME": "nehalem",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX2,-FMA,-FMA4",
}


def digests(*names, **variables):
    command = [sys.executable, str(ROOT / "tests/portable_steps.py"), *names]
    done = subprocess.run(command, env=clean_environment() | PINNED | variables, **TEXT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@fitting
@pytest.mark.timeout_seconds(300)
def test_neither_variables_nor_the_c_library_move_a_bit():
    names = "gpt2", "gemma3"
    lines = digests(*names)
    assert [line.split()[0] for line in lines] == ["functions", *names, "trial"]
    assert digests(*names, **OTHER_HOST) == lines


@needs_mpiexec
@fitting
@pytest.mark.timeout_seconds(300)
def test_unlike_hosts_train_together_and_a_resume_keeps_the_bits(tmp_path):
    (tmp_path / "run.toml").write_text('bits = "portable"\n')
    flags = [*FLAGS, "--data", *write_text(tmp_path), "--out", "out"]
    here, there = ([*RUN, *flags, *choice] for choice in (("--bits", "portable"), ("--config", "run.toml")))
    other = ["env", *(f"{name}={value}" for name, value in OTHER_HOST.items()), *there]
    command = [*launcher(), "-n", "1", *here, ":", "-n", "1", *other]
    status, printed, errors = run_command(command, timeout=200, cwd=tmp_path, env=COMPILED)
    assert status == 0, f"{printed}\n{errors}"
    (state,) = tmp_path.glob("out/step-*/optimizer.gguf")
    assert b'"bits": "portable"' in state.read_bytes()
    status, printed, errors = run_job(1, ["-m", "zero_mpi.train", *flags, "--bits", "native"], cwd=tmp_path)
    assert status == 2
    assert "is a checkpoint of another run: --bits was portable, now native" in errors


@needs_mpiexec
@fitting
def test_without_compiled_operations_it_is_refused(tmp_path):
    flags = [*FLAGS, "--data", *write_text(tmp_path), "--out", "out", "--bits", "portable"]
    status, _, errors = run_job(2, ["-m", "zero_mpi.train", *flags], cwd=tmp_path, warm=False)
    assert status == 2
    assert "--bits portable: " in errors
    assert len(errors.splitlines()) == 1


SCRIPT = """
import {first}
import zero_mpi
comm = zero_mpi.connect()
from zero_mpi.ops import trial
print(trial.digest())
"""


@fitting
@pytest.mark.timeout_seconds(300)
@pytest.mark.parametrize("first", ["zero_mpi", "numpy"])
def test_a_script_is_pinned_by_the_variable(first):
    command = [sys.executable, "-c", SCRIPT.format(first=first)]
    done = subprocess.run(command, env=clean_environment() | PINNED, **TEXT)
    if first == "numpy":
        assert "UsageError: --bits portable: NumPy was imported before zero_mpi" in done.stderr
    else:
        assert f"trial {done.stdout.strip()}" == digests("none")[-1], done.stderr
