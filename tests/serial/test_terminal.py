"""Errors and progress on a terminal are one short line each, without control characters."""

import os
import re
import subprocess
import sys

import pytest

from zero_mpi.commands.main import start
from zero_mpi.files.foreign import printable
from zero_mpi.launch import ending
from zero_mpi.telemetry import log

HOSTILE = "a\nb\r\x1b]0;title\x07\x9b2J\u202e" + "x" * 50_000 + " word" * 50_000
ARGUMENTS = {"generate": [HOSTILE], "inspect": [HOSTILE], "export": [HOSTILE, "out.gguf"]}
ARGUMENTS |= {"samples": ["model.gguf", "--data", HOSTILE], "plan": ["--doctor", HOSTILE]}
ARGUMENTS |= {"report": [HOSTILE], "trace": [HOSTILE], "hostfile": [HOSTILE, "--for", "mpich"]}


STREAMS = {  # how a shell starts a command -> exit status, and what it prints
    '"$@" > /dev/full': (1, r"zero_mpi hostfile: error: cannot write to stdout: No space left on device\n"),
    '"$@" >&-': (0, ""),
    '"$@" <&- 2>&-': (0, "h1:4\n"),
    '"$@" | true': (0, ""),
}


@pytest.mark.parametrize("shell", STREAMS)
def test_a_closed_or_full_stream_is_no_traceback(shell, tmp_path):
    (tmp_path / "hosts").write_text("h1:4\n")
    command = [sys.executable, "-m", "zero_mpi", "hostfile", str(tmp_path / "hosts"), "--for", "mpich"]
    status, printed = STREAMS[shell]
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell, "sh", *command], capture_output=True, check=False
    )
    assert ended.returncode == status
    assert re.fullmatch(printed, (ended.stdout + ended.stderr).decode())


def test_a_log_line_is_escaped_where_the_encoding_lacks_its_characters(tmp_path):
    code = "from zero_mpi.telemetry import log; log.install(0, 1); main = lambda: log.info('a\\u0101\\ufffd')"
    (tmp_path / "logs.py").write_text(code)
    start = "from zero_mpi.launch import stopping; stopping.start('train', 'logs')"
    ended = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, check=False,
        env=os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, b"a\\u0101\\ufffd\n")


ERRORS = [*ARGUMENTS.items(), *((name, [f"--{HOSTILE}"]) for name in ARGUMENTS)]
ERRORS += [("hostfile", ["hostfile", "--for", HOSTILE])]


@pytest.mark.parametrize(("name", "arguments"), ERRORS)
def test_an_error_is_one_short_line_whatever_was_given(name, arguments, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as end:
        start(name)
    printed, errors = capfd.readouterr()
    assert (end.value.code, printed, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"zero_mpi {name}: error: ")
    assert errors == printable(errors, keep="\n")
    assert len(errors) < 2000
    assert max(map(len, errors.split())) <= 200


def test_a_log_line_is_one_line_and_a_text_keeps_its_lines(capsys):
    log.install(0, 1)
    try:
        log.warning("a file says %s", HOSTILE)
        log.info_text(f"sample of {HOSTILE[:20]}:", "def f():\n\treturn '\x1b[2J'\r\n")
    finally:
        log.remove()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(r"warning: a file says a\nb\r\x1b]0;title")
    assert len(lines[0]) < 2000
    assert lines[1] == r"sample of a\nb\r\x1b]0;title\x07\x9b2J\u202exx:"
    assert lines[2:] == ["def f():", r"	return '\x1b[2J'\r", ""]


def test_the_watchdogs_words_and_a_traceback_control_nothing(capfd):
    ending.say("zero_mpi: a\x1b[2J\nb")
    assert capfd.readouterr().err == "zero_mpi: a\\x1b[2J\nb\n"
    code = (
        "from zero_mpi.launch.world import run\n"
        "def fail(world, arguments): raise RuntimeError('a\\x1b[2J' + 'x' * 100_000)\n"
        "run('it', fail, [], alone=True)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=50, check=False)
    errors = ended.stderr.decode()
    assert (ended.returncode, "Traceback" in errors, r"RuntimeError: a\x1b[2Jxx" in errors) == (1, True, True)
    assert errors == printable(errors, keep="\n")
    assert max(map(len, errors.splitlines())) < 2000
