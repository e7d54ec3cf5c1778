"""Log lines have the right level, rank and stream; importing the package logs nothing."""

import logging
import sys

import pytest

from zero_mpi.errors import JobError
from zero_mpi.telemetry import log


@pytest.fixture(autouse=True)
def not_installed():
    log.remove()
    yield
    log.remove()


def say_all():
    log.debug("a %s", "detail")
    log.info("a fact")
    log.warning("a worry")
    log.logger.error("a fault")


def heard(capsys, rank, size, level):
    log.install(rank, size, level)
    say_all()
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err.splitlines()


PLAIN = ["a fact", "warning: a worry", "error: a fault"]


@pytest.mark.parametrize(
    ("rank", "level", "lines"),
    [
        (0, "info", PLAIN),
        (0, "warning", PLAIN[1:]),
        (0, "error", PLAIN[2:]),
        (0, "debug", [f"[0/8] {line}" for line in ["a detail", *PLAIN]]),
        (3, "debug", [f"[3/8] {line}" for line in PLAIN[1:]]),
        (3, "info", [f"[3/8] {line}" for line in PLAIN[1:]]),
        (3, "error", [f"[3/8] {line}" for line in PLAIN[2:]]),
    ],
)
def test_rank_0_speaks_from_its_level_on_and_others_warn_on_stderr(rank, level, lines, capsys):
    assert heard(capsys, rank, 8, level) == (([], lines) if rank else (lines, []))


def test_a_library_is_silent_and_can_be_listened_to(capsys, caplog, monkeypatch):
    with caplog.at_level(logging.DEBUG, "zero_mpi"):
        say_all()
    assert capsys.readouterr() == ("", "")
    assert [record.levelname for record in caplog.records] == ["DEBUG", "INFO", "WARNING", "ERROR"]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # Python then prints warnings by itself
    say_all()
    assert capsys.readouterr() == ("", "")


def test_lines_are_out_at_once_and_in_one_write(monkeypatch):
    """Lines appear immediately, although Python buffers output to a pipe."""
    calls = []

    class Pipe:
        def write(self, text):
            calls.append(text)

        def flush(self):
            calls.append("flush")

    log.install(0, 1)
    monkeypatch.setattr(sys, "stdout", Pipe())
    log.info("a fact")
    assert calls == ["a fact\n", "flush"]


def test_a_command_says_a_line_once_where_the_root_logger_has_a_handler(capsys):
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(handler)
    try:
        assert heard(capsys, 0, 1, "info") == (PLAIN, [])
    finally:
        logging.getLogger().removeHandler(handler)


def test_a_stream_that_cannot_be_written_is_an_error(monkeypatch):
    log.install(0, 1)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(JobError, match="/dev/full: No space left"):
            log.info("a fact")
