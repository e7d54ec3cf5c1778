"""Tests that need several hosts or a batch system: `make test-cluster`, as root and without a launcher.

They take minutes and start daemons, so they run only if this folder or a file in it is named. A test that
cannot run here is skipped with the reason.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CLUSTER = Path(__file__).resolve().parent
for folder in (CLUSTER, CLUSTER.parent / "serial"):  # helpers of all tests, and helpers of the serial tests
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from hosts import Hosts, hosts, why_no_hosts  # noqa: E402

NOT_ASKED_FOR = "tests/cluster runs by itself, without a launcher: make test-cluster"


def asked_for(argument: str) -> bool:
    place = Path(argument.partition("::")[0]).resolve()
    return CLUSTER in (place, *place.parents)


def pytest_collection_modifyitems(config, items):
    """Leave these tests out if other tests are named or if there are several ranks."""
    harness = config.pluginmanager.getplugin("zero_mpi-harness")
    if harness.world.size == 1 and any(map(asked_for, config.args)):
        return
    skipped = [item for item in items if CLUSTER in item.path.parents]
    if skipped:
        config.hook.pytest_deselected(items=skipped)
        items[:] = [item for item in items if item not in skipped]
        harness.deselected[NOT_ASKED_FOR] = len(skipped)


@pytest.fixture(scope="session")
def four_hosts() -> Iterator[Hosts]:
    """Hosts h1 to h4 with unlimited links. Tests must leave them as they are."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    with hosts(4) as cluster:
        yield cluster


@pytest.fixture
def common_path() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="zero_mpi-test-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)
