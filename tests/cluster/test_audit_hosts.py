"""`--audit` on three hosts: who computed wrongly is named with its host, by ranks on the two others."""

import json
import re

import pytest
from audited_job import FLAGS, write_script
from hosts import installed, why_no_hosts
from test_command_bits import SIZES, write_text

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
AUDIT = ["--audit", "2", "--transport", "mpi"]


def run(here, folder, *, fault):
    """(status, stdout, stderr) of an audited run of a rank on each of h1, h2 and h3."""
    try:
        installed("mpich")
    except LookupError as error:
        pytest.skip(str(error))
    flags = [*SIZES, *FLAGS, *AUDIT, "--out", str(folder / "out"), "--data", *write_text(folder)]
    return here.run(3, 1, [str(write_script(folder, fault)), *flags])


def test_a_rank_that_was_wrong_is_named_with_its_host(four_hosts, common_path):
    status, printed, errors = run(four_hosts, common_path, fault=True)
    assert status == 1, printed
    wanted = r"zero_mpi train: error: step 4, micro-batch [14]: rank 1 on h2 computed \S+ wrongly "
    assert re.search(wanted + r"\(ranks 2 and 0 agree\); checkpoints of earlier steps hold", errors)
    assert "Traceback" not in errors
    said = json.loads((common_path / "out" / "status.json").read_text())
    assert said["reason"].startswith("step 4, micro-batch")


def test_without_a_fault_there_is_no_alarm(four_hosts, common_path):
    status, printed, errors = run(four_hosts, common_path, fault=False)
    assert (status, errors) == (0, ""), printed
    events = [json.loads(line) for line in (common_path / "out" / "events.jsonl").read_text().splitlines()]
    assert not [event for event in events if event["event"] == "warning" and "rank" in event]
