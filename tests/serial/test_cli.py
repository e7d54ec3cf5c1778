"""Tests of all commands: `--help`, `--version`, unknown flags, completion."""

import re
import sys
from pathlib import Path

import bpe_files
import pytest
from jobs import run_command, run_job
from test_command_bits import needs_mpiexec

from zero_mpi import __version__
from zero_mpi.cli import parser
from zero_mpi.commands import completion, main, old_form
from zero_mpi.commands.evaluate import task
from zero_mpi.commands.export import command as export
from zero_mpi.commands.generate import command as generate
from zero_mpi.config.command_line import EVERY, FIRST, make_parser, parse
from zero_mpi.config.settings import spelled
from zero_mpi.data import ByteTokenizer
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World

WIDTH = 80
NAMES = list(main.COMMANDS)


def python(*arguments, **rest):
    return run_command([sys.executable, *arguments], timeout=30, **rest)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_that_fits_a_version_and_names_unknown_flags(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    argparser = completion.parser_of(name)
    lines = argparser.format_help().splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    assert [action.dest for action in argparser._actions if not action.help] == []
    assert ("zero_mpi.train" if name == "train" else f"zero-mpi {name}") in lines[0]
    texts = [" ".join(parser.Help("")._expand_help(action).split()) for action in argparser._actions]
    buffer = 3 * (WIDTH - 2 - parser.COLUMN)  # number of characters in three lines of help
    assert [text for text in texts if len(re.sub(r" \[.*\]", "", text)) > buffer] == []
    with pytest.raises(SystemExit) as end:
        argparser.parse_args(["--version"])
    assert not end.value.code
    first, libraries = capsys.readouterr().out.splitlines()
    assert first == f"zero_mpi {__version__}"
    assert "NumPy " in libraries
    with pytest.raises(UsageError, match=r"--versoin; did you mean --version\?$"):
        argparser.parse_args(["--versoin"])


def test_help_of_train_shows_the_first_flags_on_two_screens(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    lines = make_parser(every=False).format_help().splitlines()
    assert len(lines) <= 80
    flags = {line.split()[0] for line in lines if line.startswith("  --")}
    assert flags == {"--version", EVERY, "--config", *map(spelled, FIRST)}


@needs_mpiexec
@pytest.mark.parametrize(("name", "instead"), [("report", "report"), ("plan", "--ranks N")])
def test_a_command_for_one_process_refuses_more_of_them_and_has_its_help(name, instead):
    status, printed, errors = run_job(2, ["-m", "zero_mpi", name, "x"])
    assert (status, printed) == (2, "")
    (line,) = (line for line in errors.splitlines() if "error: " in line)
    assert all(word in line for word in (name, "mpirun", instead))
    status, printed, _ = run_job(2, ["-m", "zero_mpi", name, "--help"])
    assert (status, printed.count("usage: ")) == (0, 1)


SAID_ONCE = (["train", "--version"], ["generate", "--version"], ["hostfile", "-h"], ["doctor", "-h"])


@needs_mpiexec
@pytest.mark.parametrize("arguments", SAID_ONCE)
def test_one_rank_speaks_for_all(arguments):
    """Only rank 0 prints, even in commands that do not start MPI."""
    status, printed, errors = run_job(2, ["-m", "zero_mpi", *arguments], timeout=30)
    assert (status, errors) == (0, "")
    assert printed.count("zero_mpi ") == 1 if "--version" in arguments else printed.count("usage:") == 1


# A process on the login node of a cluster may not be allowed to call MPI_Init.
NO_MPI = """import builtins, runpy, sys
class Stub:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            open("started", "a").write(" ".join(sys.argv))
            raise ImportError(name)
sys.meta_path.insert(0, Stub())
sys.argv = ["zero-mpi", *sys.argv[1:]]
runpy.run_module("zero_mpi", run_name="__main__")
"""
WITHOUT_RANKS = [["--help"], ["--version"], ["completion", "bash"], ["hostfile", "none"]]
WITHOUT_RANKS += [["inspect", "m.gguf"], ["report", "none"], ["trace", "none"]]
WITHOUT_RANKS += [
    ["samples", "m.gguf", "--data", "c.jsonl", "--chat-template", "t.jinja"],
    ["generate", "m.gguf", "--prompt", "a", "--tokens", "1"],
    ["export", "m.gguf", "out.gguf", "--type", "q8_0"],
    ["plan", "--ranks", "2", "--layers", "1", "--dim", "8", "--heads", "2"],
]


@pytest.mark.parametrize("arguments", [*WITHOUT_RANKS, *([name, "--help"] for name in NAMES)], ids=" ".join)
def test_what_needs_no_ranks_starts_no_mpi(arguments, tmp_path):
    bpe_files.write_model(tmp_path / "m.gguf", ByteTokenizer().metadata())
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    status, _, errors = python("-c", NO_MPI, *arguments, cwd=tmp_path)
    assert not (tmp_path / "started").exists(), errors
    assert status == (2 if "none" in arguments else 0), errors


def test_the_package_runs_as_the_console_script_does():
    console = [Path(sys.executable).parent / "zero-mpi"]
    assert console[0].exists(), "the package is installed, so its script is there"
    for arguments in (["--help"], ["--version"], ["hostfile", "--fro", "mpich"]):
        assert python("-m", "zero_mpi", *arguments) == run_command([*console, *arguments], timeout=30)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lerning-rate 1", "--lerning-rate; did you mean --learning-rate?"),
        ("--xyzzy", "--xyzzy; see --help"),
        ("--audit", "--audit was removed: "),
    ],
)
def test_an_unknown_flag_is_named_with_the_nearest_one(flags, expected):
    with pytest.raises(UsageError) as error:
        parse(flags.split())
    assert expected in str(error.value)


def test_a_setting_of_a_file_and_a_choice_in_it(tmp_path):
    path = tmp_path / "run.toml"
    for text, expected in (
        ("batch_sise = 4", r"'batch_sise' is not a setting; did you mean batch_size\?$"),
        ("learning-rat = 4", r"'learning-rat' is not a setting; did you mean learning_rate\?$"),
        ("qqq = 4", r"'qqq' is not a setting; see --help for the names$"),
        ('schedule = "cosin"', r"--schedule cosin: expected one of .*; did you mean cosine\?$"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=expected):
            parse(["--config", str(path)])


def test_values_that_look_like_flags_stay_values():
    assert parse(["--prompt", "-a b", "--out=--x y"]).prompt == "-a b"
    with pytest.raises(UsageError, match=r"^--seed -1: expected at least 0$"):
        parse(["--seed", "-1"])
    assert parser.flag_of("-1e-3") == parser.flag_of("-") == parser.flag_of("plain") == ""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [(export, ["model", "out", "--merge"]), (generate, ["model", "--lora"]), (task, ["model", "--lora"])],
)
def test_a_second_adapter_is_refused(module, arguments):
    assert "one" in vars(module.make_parser().parse_args([*arguments, "one"])).values()
    with pytest.raises(UsageError, match=f"{arguments[-1]} two: .* one"):
        module.make_parser().parse_args([*arguments, "one", f"{arguments[-1]}=two"])


def test_learning_rate_is_another_name_of_lr(tmp_path):
    (tmp_path / "run.toml").write_text("learning_rate = 0.5\n")
    assert parse(["--learning-rate", "0.25"]).lr == 0.25
    assert parse(["--config", str(tmp_path / "run.toml")]).lr == 0.5


@pytest.mark.parametrize("name", [*old_form.MOVED, "plan"])
def test_the_old_form_of_a_command_goes_on_working_and_names_the_new_one(name):
    status, printed, errors = python("-m", f"zero_mpi.{name}", "--version")
    assert (status, printed.splitlines()[0]) == (0, f"zero_mpi {__version__}")
    assert errors.count("\n") == 1
    assert f"zero-mpi {name}" in errors


TRY = r"""
eval "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
word=${COMP_WORDS[COMP_CWORD]}; before=${COMP_WORDS[COMP_CWORD-1]}
complete -p zero-mpi | { read -r line; name=${line#*-F }; ${name%% *} zero-mpi "$word" "$before"
printf '%s\n' "${COMPREPLY[@]}"; }
"""


@pytest.fixture(scope="module")
def script():
    status, printed, errors = python("-m", "zero_mpi", "completion", "bash")
    assert (status, errors) == (0, "")
    return printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], {"train", "trace"}),
        (["train", "--strat"], {"--strategy"}),
        (["train", "--strategy", ""], {"full-shard", "shard-grad-op", "no-shard", "hybrid-shard"}),
        (["train", "--no-reco"], {"--no-recompute"}),
        (["export", "a", "b", "--type", "q8"], {"q8_0"}),
        (["inspect", "some-m"], {"some-model.gguf"}),
        (["train", "--out", "a-f"], {"a-folder"}),
        (["completion", ""], set(completion.SHELLS)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash_completes(script, words, expected, tmp_path):
    (tmp_path / "some-model.gguf").write_text("")
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a-file").write_text("")
    command = ["bash", "-c", TRY, "bash", script, "zero-mpi", *words]
    status, printed, errors = run_command(command, timeout=20, cwd=tmp_path)
    assert (status, errors) == (0, "")
    assert {line.strip() for line in printed.splitlines()} == expected


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_gets_a_script_of_all_commands(shell, capfdbinary):
    assert completion.command(World(0, 1), [shell]) == 0
    printed = capfdbinary.readouterr().out.decode()
    assert [name for name in NAMES if name not in printed] == []
    assert "val-fraction" in printed
