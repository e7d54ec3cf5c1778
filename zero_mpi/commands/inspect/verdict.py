"""Whether the tensors of a checkpoint are those that its checksums were made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zero_mpi.checkpoint.sound import (
    STATE_DIGEST,
    TENSOR_DIGESTS,
    CheckpointFiles,
    check_files,
    digest_of_files,
    from_lines,
)
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.commands.inspect.pieces import Report, Subject, Tensor, keys_of
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show

# ----------------------------------------------------------------------------------------------- verdict


def verdict(subject: Subject, read: Mapping[str, list[Tensor]]) -> Report:
    """Every digest beside those in the files, the pair, and values that are not finite."""
    digests = {role: {tensor.spec.name: tensor.digest for tensor in rows} for role, rows in read.items()}
    every = [tensor for rows in read.values() for tensor in rows]
    with_sums = [role for role, part in subject.parts.items() if TENSOR_DIGESTS in part.metadata]
    whole = digest_of_files(digests)
    problems = [
        problem for role in with_sums for problem in wrong_digests(subject.parts[role], digests[role])
    ]
    if subject.model is not None and subject.state is not None:
        files = CheckpointFiles(subject.model, subject.state, subject.average)
        problems += wrong_files(files, problems, whole)
    not_finite = {tensor.spec.name: tensor.not_finite for tensor in every if tensor.not_finite}
    return {
        "checksums": sum(len(digests[role]) for role in with_sums),
        "problems": problems,
        "state_digest": whole,
        "not_finite": not_finite,
        "unknown_types": sorted({tensor.spec.type.name for tensor in every if tensor.not_finite is None}),
        "sound": not problems and not not_finite,
    }


def wrong_files(files: CheckpointFiles, known: Sequence[str], whole: str) -> Iterator[str]:
    """What keeps files from being a checkpoint whose state has the digest `whole`."""
    try:
        check_files(files)
        if not known and keys_of(files.state).text(STATE_DIGEST) != whole:
            yield f"{files.state.path}: key {STATE_DIGEST} is not that of the tensors"
    except UsageError as error:
        yield str(error)


def wrong_digests(source: WeightSource, found: Mapping[str, str]) -> Iterator[str]:
    """What differs between the tensors of a file and the digests that it holds."""
    path = source.path
    try:
        recorded = from_lines(keys_of(source).texts(TENSOR_DIGESTS))
    except UsageError as error:
        yield str(error)
        return
    for name in [*found, *(name for name in recorded if name not in found)]:
        if name not in recorded:
            yield f"{path}: tensor {show(name)} has no checksum, others have"
        elif name not in found:
            yield f"{path}: tensor {show(name)} has a checksum and is not there"
        elif found[name] != recorded[name]:
            yield f"{path}: tensor {show(name)} is not the one that was written: its checksum differs"
