"""Plugin that runs pytest on any number of ranks with one report and without hangs.

    mpiexec -n 4 python -m pytest --with-mpi        (or plain `pytest`: a world of one rank)

- Rank 0 writes to the terminal; other ranks write to $ZERO_MPI_TEST_LOGS/rankN.log (default test-logs/).
- After every phase of every test (setup, call, teardown) the ranks exchange outcomes. The worst outcome of
  any rank becomes the outcome on all, so rank 0 reports the result with the failing rank's traceback.
- If a rank fails before a collective, the other ranks hang in it. A watchdog then prints all stacks and
  ends the job with status 86, after $ZERO_MPI_TEST_TIMEOUT seconds (60) or the test's own marker.
- tests/serial runs in one process only. Its tests start their own jobs by `jobs.run_job`.
- A test with three parameters or more runs with enough combinations to cover every pair of values.
- `make test` uses --quick, `make test-all` does not. With --quick a test for several numbers of ranks
  runs at the number nearest to 3, and tests marked `long` are left out.
"""

import atexit
import contextlib
import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
for folder in (TESTS / "fuzz", TESTS):  # needed in some of pytest's import modes
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import jobs  # noqa: E402
from pairs import beyond_pairs  # noqa: E402

jobs.prepare_process()  # before a test module imports numpy or MPI

TIMEOUT = float(os.environ.get("ZERO_MPI_TEST_TIMEOUT", "60"))
TIMEOUT_STATUS, DISAGREED_STATUS = 86, 3
SUITE_SIZES = (1, 2, 3, 4, 8)  # sizes that run_sizes.py runs
MOST_QUICK = 4  # largest size of run_sizes.py with --quick
QUICK_SIZE = 3  # preferred size of --quick: slices are uneven, one rank is in the middle
MORE_OF_THE_SAME = "adds only more cases: make test-all"
THIRD_VALUES = "other cases cover every pair of values"
PATIENCE = 1.0  # seconds after which a failed rank reports by itself if other ranks do not answer


class Alone:
    """Communicator for the harness in a process without a launcher."""

    rank, size = 0, 1

    def allgather(self, item):
        return [item]

    def bcast(self, item):
        return item

    def Barrier(self):
        """Wait for all ranks."""


def join_world(with_mpi):
    """Return a communicator of the harness itself (its messages never mix with a test's), or `Alone`.

    MPI is not used unless a launcher or an option requests it, because the serial tests must
    run where no MPI library can be loaded.
    """
    if not (with_mpi or jobs.inside_job()):
        return Alone()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise pytest.UsageError(f"cannot run under MPI: {error}") from error
    atexit.register(finalize, MPI)
    return MPI.COMM_WORLD.Dup()


def finalize(MPI):
    """End MPI while a watchdog still runs, because an open request or window makes the call hang."""
    if not MPI.Is_finalized():
        faulthandler.dump_traceback_later(TIMEOUT, exit=True)  # a C thread, which needs no interpreter lock
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()


class Harness:
    def __init__(self, world):
        self.world = world
        self.stderr = os.dup(2)  # outside pytest's capture, so that the last message is printed
        self.deselected = {}  # reason -> number of tests
        # Rank 0 chooses the name; the first test that needs the folder creates it.
        self.base = Path(tempfile.gettempdir(), world.bcast(f"zero_mpi-tests-{uuid.uuid4().hex}"))
        os.environ.setdefault("ZERO_MPI_CACHE", str(self.base / "encoded"))  # for jobs too

    def shout(self, text):
        os.write(self.stderr, f"\n[rank {self.world.rank}] {text}\n".encode())

    @contextlib.contextmanager
    def watched(self, what, seconds=TIMEOUT) -> Iterator[None]:
        def end_job():
            self.shout(f"{what}: not done after {seconds:g} s; the stacks of this rank:")
            faulthandler.dump_traceback(all_threads=True, file=self.stderr)
            jobs.kill_running()
            self.remove(self.base)
            time.sleep(0.5)  # gives the other ranks time to write their stacks
            os._exit(TIMEOUT_STATUS)  # not MPI_Abort: the main thread may hold MPI's lock

        watchdog = threading.Timer(seconds, end_job)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session):
        session.config.option.with_mpi = True  # otherwise pytest-mpi skips `mpi` tests on one rank
        if self.world.rank == 0:
            return
        folder = Path(os.environ.get("ZERO_MPI_TEST_LOGS", "test-logs"))
        folder.mkdir(parents=True, exist_ok=True)
        log = open(folder / f"rank{self.world.rank}.log", "w")  # noqa: SIM115 (closed after the summary)
        session.config.add_cleanup(log.close)
        # pytest has no public way to redirect the reporter, and removing it breaks plugins that need it.
        session.config.pluginmanager.getplugin("terminalreporter")._tw._file = log

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        """Leave out tests that do not fit this world size; stop if the ranks collected different tests."""
        leave_out = {item: reason for item in items if (reason := self.reason_to_leave_out(item))}
        remaining = (item for item in items if item not in leave_out)
        leave_out |= dict.fromkeys(beyond_pairs(remaining), THIRD_VALUES)
        if leave_out:
            config.hook.pytest_deselected(items=list(leave_out))
            items[:] = [item for item in items if item not in leave_out]
            for reason in leave_out.values():
                self.deselected[reason] = self.deselected.get(reason, 0) + 1
        with self.watched("waiting for all ranks to collect"):
            collected = self.world.allgather([item.nodeid for item in items])
        for rank, names in enumerate(collected):
            if names != collected[0]:
                odd = sorted(set(names) ^ set(collected[0])) or ["the same tests in another order"]
                pytest.exit(
                    f"ranks 0 and {rank} collected different tests: {', '.join(odd[:5])}",
                    returncode=DISAGREED_STATUS,
                )

    def reason_to_leave_out(self, item):
        if self.world.size > 1 and TESTS / "serial" in item.path.parents:
            return "tests/serial runs in one process: python -m pytest tests/serial"
        marker, sizes = item.get_closest_marker("world"), sizes_of(item)
        if not sizes:
            raise pytest.UsageError(
                f"{item.nodeid}: world{marker.args} names no size of {SUITE_SIZES}, "
                "so no run of the suite would ever run it"
            )
        if nearest(sizes) > MOST_QUICK:
            raise pytest.UsageError(f"{item.nodeid}: world{sizes} has no size that `make test` runs")
        if marker and self.world.size not in marker.args:
            return f"for other world sizes than {self.world.size}"
        if item.config.getoption("quick") and (
            item.get_closest_marker("long") or not self.is_its_place(item)
        ):
            return MORE_OF_THE_SAME
        return None

    def is_its_place(self, item):
        return TESTS / "serial" in item.path.parents or self.world.size == nearest(sizes_of(item))

    def pytest_report_collectionfinish(self):
        return [f"deselected {count}: {reason}" for reason, count in self.deselected.items()]

    def pytest_collectreport(self, report):
        if report.failed and self.world.rank != 0:
            self.shout(f"cannot collect {report.nodeid}\n{str(report.longrepr)[-3000:]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        """Run a test (all its phases) under the watchdog, then remove its folder."""
        marker = item.get_closest_marker("timeout_seconds")
        with self.watched(item.nodeid, marker.args[0] if marker else TIMEOUT):
            result = yield
        self.remove(self.folder_of(item))  # all ranks have finished the teardown
        return result

    def folder_of(self, item):
        return self.base / f"{zlib.crc32(item.nodeid.encode()):08x}"

    def remove(self, folder):
        if self.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        """Make the worst outcome of any rank the outcome on all ranks.

        Ranks agree on every phase. Setup and teardown run on all ranks, and call only if setup passed on all
        of them, so the allgathers match. If ranks agreed after the call phase only, the failed setup of one
        rank would match allgathers of different tests.
        """
        report = yield
        if self.world.size == 1:
            return report
        text = failure_text(report) if report.failed else ""
        speak_up = threading.Timer(PATIENCE, self.shout, [f"FAILED {item.nodeid} ({call.when})\n{text}"])
        if report.failed:  # the other ranks may be stuck in a collective of this test
            speak_up.start()
        outcomes = self.world.allgather((report.outcome, text))
        speak_up.cancel()
        merge_outcomes(report, outcomes, self.world.rank)
        return report

    def pytest_internalerror(self, excrepr):
        """End the job after an error of pytest in one rank, because other ranks would wait forever."""
        if self.world.size > 1:
            self.shout(f"internal error\n{excrepr}")
            self.world.Abort(DISAGREED_STATUS)

    def pytest_unconfigure(self):
        """Let rank 0 finish its summary: Open MPI ends a job when the first rank exits with a failure."""
        with self.watched("waiting for all ranks to end"):
            self.world.Barrier()
        self.remove(self.base)


def sizes_of(item):
    marker = item.get_closest_marker("world")
    return set(marker.args if marker else SUITE_SIZES) & set(SUITE_SIZES)


def nearest(sizes):
    return min(sorted(sizes), key=lambda size: abs(size - QUICK_SIZE))


def failure_text(report):
    captured = "".join(f"\n--- {title} ---\n{text[-2000:]}" for title, text in report.sections)
    return f"{report.longreprtext[-6000:]}{captured}"


def merge_outcomes(report, outcomes, own_rank):
    failed = {rank: text for rank, (outcome, text) in enumerate(outcomes) if outcome == "failed"}
    if report.failed:
        others = sorted(failed.keys() - {own_rank})
        if others:
            report.sections.append(("other ranks", f"failed too: ranks {others}"))
    elif failed:
        report.outcome = "failed"
        report.longrepr = "\n".join(f"--- rank {rank} ({report.when}) ---\n{failed[rank]}" for rank in failed)
    elif len({outcome for outcome, _ in outcomes}) > 1:
        report.outcome = "failed"
        report.longrepr = f"ranks disagree in {report.when}: {[outcome for outcome, _ in outcomes]}"


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out tests that add only more cases")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "world(*sizes): runs only at these world sizes")
    config.addinivalue_line("markers", "timeout_seconds(n): this test's time limit instead of the default")
    config.addinivalue_line(
        "markers", "carries(*transports): uses these transports for GPU memory, with any parameters"
    )
    config.addinivalue_line("markers", "long: adds only more cases; left out with --quick")
    harness = Harness(join_world(config.getoption("with_mpi", False)))
    config.pluginmanager.register(harness, "zero_mpi-harness")
    if harness.world.rank != 0:
        config.workerinput = {}  # keeps pytest from writing caches and JUnit files in this process


class Unavailable(pytest.Module):
    """Placeholder for a module of tests/mpi without an MPI library: skipped, with the reason."""

    reason = ""

    def collect(self):
        pytest.skip(self.reason, allow_module_level=True)


def why_no_mpi():
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return f"no MPI: {error}"
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path, parent):
    """Skip tests/mpi without an MPI; serial tests must still run."""
    if TESTS / "mpi" in module_path.parents and (reason := why_no_mpi()):
        module = Unavailable.from_parent(parent, path=module_path)
        module.reason = reason
        return module
    return None


@pytest.fixture(scope="session")
def quick(request):
    """Return whether to leave out repetitions, such as rounds of a random search."""
    return request.config.getoption("quick")


@pytest.fixture
def ranks_folder(request):
    """Return an empty folder, the same on all ranks; it is removed after all ranks finish the test."""
    harness = request.config.pluginmanager.getplugin("zero_mpi-harness")
    folder = harness.folder_of(request.node)
    folder.mkdir(parents=True, exist_ok=True)  # the first rank creates the folder, so no rank waits
    return folder  # the harness removes the folder after the teardown of all ranks
