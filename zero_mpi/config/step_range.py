"""Steps that a flag names: some of a run, or a share of all."""

from __future__ import annotations

import re
from typing import Any

from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown


def step_range(text: str | None, steps: int | None) -> tuple[int, int] | None:
    """`--trace-steps` as (first, stop) for a run of `steps`, if known; None if not given. UsageError."""
    if text is None:
        return None
    found, given = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text), f"--trace-steps {shown(text)}"
    if not found or not 1 <= int(found[1]) < int(found[2]):
        raise UsageError(f"{given}: expected FIRST:STOP from 1 on; 10:13 is 10, 11 and 12")
    if steps is not None and int(found[1]) > steps:
        raise UsageError(f"{given}: expected a step of the run, which ends with --steps {steps}")
    return int(found[1]), int(found[2])


def warmup_steps(wanted: Any, steps: int | None) -> int:
    """`--warmup` as a number; a share of all stays text until `steps` are known. Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,18})|([0-9]{1,3}(?:\.[0-9]{1,9})?)%", str(wanted))
    if not found or float(found[2] or 0) > 100:
        raise UsageError(f"--warmup {shown(wanted)}: expected steps such as 40, or a share of all such as 5%")
    if found[1]:
        return int(found[1])
    share: int = wanted if steps is None else round(float(found[2]) / 100 * steps)
    return share
