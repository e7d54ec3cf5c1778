"""Comparison of two models, checkpoints or runs: finds the first bits that differ.

The stored bytes of the two are read in chunks at the same time. So memory does not grow with the model, and
the result does not depend on stored digests. Only the first tensor that differs is compared by value.
"""

import os
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.commands.inspect.examine import Report, Subject, as_json, elements, open_subject, pieces
from zero_mpi.commands.verify.history import Records, other
from zero_mpi.errors import UsageError
from zero_mpi.files.open import exists
from zero_mpi.telemetry.metrics import METRICS
from zero_mpi.telemetry.proof import bits_of

Stored = tuple[WeightSource, TensorSpec]
LISTS = ("differing", "only_in_first", "only_in_second")


def compare_paths(first: Path, second: Path) -> Report:
    """Return the comparison of two paths. For run folders, it covers records and checkpoints."""
    report = compare(first, second)
    if exists(first / METRICS) and exists(second / METRICS):
        report["records"] = compare_records(first, second)
        report["checkpoint"] = compare_checkpoints(first, second)
        steps = report["records"]["step"], report["checkpoint"]["step"]
        report["same"] = report.pop("same") and steps == (None, None)
    return report


def compare(first: Path, second: Path) -> Report:
    """Compare two models. Raise UsageError if one is unreadable. If both are the same, read no tensors."""
    subject = open_subject(first)
    is_one = exists(second) and os.path.samefile(first, second)
    other_subject = subject if is_one else open_subject(second)
    tensors, other_tensors = tensors_of(subject), tensors_of(other_subject)
    common = [key for key in tensors if key in other_tensors]
    differing = [key for key in common if not is_one and not same(tensors[key], other_tensors[key])]
    report: Report = {
        "paths": [str(first), str(second)],
        "tensors": len(common),
        "differing": [name for _, name in differing],
        "difference": difference(tensors[differing[0]], other_tensors[differing[0]]) if differing else None,
        "only_in_first": [name for role, name in tensors if (role, name) not in other_tensors],
        "only_in_second": [name for role, name in other_tensors if (role, name) not in tensors],
        "keys": [] if is_one else list(differing_keys(subject, other_subject)),
    }
    return report | {"same": not any(report[name] for name in (*LISTS, "keys"))}


def tensors_of(subject: Subject) -> dict[tuple[str, str], Stored]:
    """Return a subject's tensors, keyed by (role, name)."""
    parts = subject.parts.items()
    return {(role, name): (part, spec) for role, part in parts for name, spec in part.tensors.items()}


def side_by_side(first: Stored, second: Stored) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of chunks of equal length from the stored bytes of two tensors of equal shape and type."""
    mixed = type(first[0]) is not type(second[0])
    for a, b in zip(pieces(*first, mixed), pieces(*second, mixed), strict=True):
        yield np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)


def same(first: Stored, second: Stored) -> bool:
    """Return whether shape, type and all bits are equal. Reading stops at the first difference."""
    if (first[1].shape, first[1].type) != (second[1].shape, second[1].type):
        return False
    return all(np.array_equal(*pair) for pair in side_by_side(first, second))


def difference(first: Stored, second: Stored) -> Report:
    """Return how two tensors differ: shape or type, or the first difference, its values, and the largest gap.

    The gap is 0 or NaN if only the bits differ (sign of a zero, payload of a NaN). It is None for a
    type that cannot be decoded.
    """
    spec = first[1]
    formats = [{"type": tensor.type.name, "shape": list(tensor.shape)} for _, tensor in (first, second)]
    report: Report = {"name": spec.name, "stored": formats}
    if formats[0] != formats[1]:
        return report
    block, width = GGML_QUANT_SIZES[spec.type]
    offset, count = 0, 0
    largest: float | None = 0.0
    for a, b in side_by_side(first, second):
        if not np.array_equal(a, b):
            blocks = np.flatnonzero((a != b).reshape(-1, width).any(1))
            values = elements(a, spec.type), elements(b, spec.type)
            if "element" not in report:
                report |= first_of(int(blocks[0]) * block, block, offset, spec, values)
            if values[0] is None or largest is None:
                largest = None
            else:
                with np.errstate(all="ignore"):
                    gap = float(np.abs(values[0].astype(np.float64) - values[1].astype(np.float64)).max())
                largest = gap if isnan(gap) or gap > largest else largest
            count += blocks.size
        offset += a.size // width * block
    return report | {"blocks" if block > 1 else "elements": count, "largest": as_json(largest)}


def first_of(start: int, block: int, offset: int, spec: TensorSpec, values: tuple[Any, Any]) -> Report:
    """Return index and values of the first difference in the chunk's block that begins at element `start`."""
    json_pair = None
    if values[0] is not None:
        pair = [value[start : start + block] for value in values]
        odd = np.flatnonzero(pair[0] != pair[1])
        first = int(odd[0]) if odd.size else 0
        start, json_pair = start + first, [as_json(value[first]) for value in pair]
    place = np.unravel_index(offset + start, spec.shape)
    return {"element": [int(index) for index in place], "values": json_pair}


def differing_keys(first: Subject, second: Subject) -> Iterator[Report]:
    """Yield the keys that differ in value or type, with both values. The value of a missing key is None."""
    for role, part in first.parts.items():
        if role in second.parts:
            pair = part.metadata, second.parts[role].metadata
            for key in pair[0] | pair[1]:
                values = [metadata.get(key) for metadata in pair]
                if not equal(*values):
                    yield {"file": role, "key": key, "values": [as_json(value) for value in values]}


def equal(a: Any, b: Any) -> bool:
    """Return whether two values of keys have the same type and, if they are NumPy's, the same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    return bool(a == b)


def compare_records(first: Path, second: Path) -> Report:
    """Return the number of common records, and the step, field and values of the first difference."""
    files = Records(first), Records(second)
    common = 0
    while files[0].step and files[1].step:
        steps = [file.step for file in files]
        if steps[0] != steps[1]:
            files[steps[0] > steps[1]].take()
            continue
        a, b = (bits_of(file.take()) for file in files)
        common += 1
        if mismatch := other(b, a):
            name = mismatch[0]
            return {"common": common, "step": steps[0], "field": name, "values": [a.get(name), b.get(name)]}
    return {"common": common, "step": None}


def compare_checkpoints(first: Path, second: Path) -> Report:
    """Return the number of common checkpoints, and the difference in the first checkpoint that differs."""
    checkpoints = [dict(folders.steps(run)) for run in (first, second)]
    common = sorted(checkpoints[0].keys() & checkpoints[1].keys())
    for step in common:
        try:
            report = compare(checkpoints[0][step], checkpoints[1][step])
        except UsageError as error:
            return {"common": len(common), "step": step, "problem": str(error)}
        if any(report[name] for name in LISTS):
            names = ("tensors", "difference", *LISTS)
            return {"common": len(common), "step": step, **{name: report[name] for name in names}}
    return {"common": len(common), "step": None}
