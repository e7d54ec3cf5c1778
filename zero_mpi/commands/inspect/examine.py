"""Description and check of a model file or a checkpoint, as one dictionary of plain values.

Each tensor is read once, in pieces: its digest is computed and values that are not finite are counted, so
memory does not grow with the model. A checkpoint of zero_mpi is compared with its own digests; the digest of
its whole state does not depend on the number of ranks that wrote it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import (
    ID,
    STATE_DIGEST,
    TENSOR_DIGESTS,
    CheckpointFiles,
    check_files,
    digest_of_files,
    from_lines,
)
from zero_mpi.checkpoint.weights import WeightSource, is_adapter_file, keys_of, lora_of
from zero_mpi.commands.inspect.pieces import Report, Subject, Tensor, open_subject, read_tensor
from zero_mpi.data import ByteTokenizer
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.models import config_from_gguf


def verdict(subject: Subject, read: Mapping[str, list[Tensor]]) -> Report:
    """Return every digest beside those in the files, the pair, and values that are not finite."""
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
    """Yield what keeps files from being a checkpoint whose state has the digest `whole`."""
    try:
        check_files(files)
        if not known and keys_of(files.state).text(STATE_DIGEST) != whole:
            yield f"{files.state.path}: key {STATE_DIGEST} does not match the tensors"
    except UsageError as error:
        yield str(error)


def wrong_digests(source: WeightSource, found: Mapping[str, str]) -> Iterator[str]:
    """Yield differences between the tensors of a file and the digests that it holds."""
    path = source.path
    try:
        recorded = from_lines(keys_of(source).texts(TENSOR_DIGESTS))
    except UsageError as error:
        yield str(error)
        return
    for name in [*found, *(name for name in recorded if name not in found)]:
        if name not in recorded:
            yield f"{path}: tensor {show(name)} has no checksum, but others do"
        elif name not in found:
            yield f"{path}: tensor {show(name)} has a checksum but is missing"
        elif found[name] != recorded[name]:
            yield f"{path}: tensor {show(name)} was changed after it was written: its checksum differs"


LONG, FEW = 60, 3  # letters of a text and items of an array that are shown by default
SIZES = {  # key of an architecture -> its name here
    "block_count": "blocks",
    "embedding_length": "width",
    "attention.head_count": "heads",
    "attention.head_count_kv": "key/value heads",
    "feed_forward_length": "feed-forward",
    "expert_count": "experts",
    "expert_used_count": "experts used",
    "expert_feed_forward_length": "expert feed-forward",
    "context_length": "context",
    "vocab_size": "vocabulary",
}
SUMMARISED = ("general.architecture", "general.alignment", "tokenizer.", "training.", "optimizer.")


def examine(path: Path, *, keys: bool = False, tensors: bool = False) -> Report:
    """Return the report on a path; `keys` and `tensors` ask for all of these."""
    subject = open_subject(path)
    read = {
        role: [read_tensor(part, spec) for spec in part.tensors.values()]
        for role, part in subject.parts.items()
    }
    found: Report = {"path": str(path), "files": [about_file(part) for part in subject.parts.values()]}
    if subject.model is not None:
        found["model"] = about_model(subject.model)
        found["tokenizer"] = about_tokenizer(keys_of(subject.model))
    found["types"] = about_types([tensor for rows in read.values() for tensor in rows])
    found["keys"] = {role: about_keys(part.metadata, keys) for role, part in subject.parts.items()}
    found["training"] = about_training(subject)
    found |= verdict(subject, read)
    if tensors:
        found["tensors"] = {role: [about_tensor(tensor) for tensor in rows] for role, rows in read.items()}
    return found


def about_file(source: WeightSource) -> Report:
    """Return name and size of a file, a split file or a folder."""
    sizes = [spec.size for spec in source.tensors.values()]
    common = {"path": str(source.path), "tensors": len(sizes), "elements": sum(sizes)}
    if isinstance(source, GGUFFile):
        return common | {"format": "GGUF", "bytes": source.nbytes, "parts": len(source.parts)}
    nbytes = sum(spec.nbytes for spec in source.tensors.values())
    return common | {"format": "safetensors", "bytes": nbytes, "parts": 1}


def about_model(source: WeightSource) -> Report:
    """Return architecture and sizes by the keys, and why zero_mpi cannot run the model, if so."""
    metadata, shapes = source.metadata, {name: spec.shape for name, spec in source.tensors.items()}
    arch = keys_of(source).architecture
    if isinstance(source, GGUFFile) and is_adapter_file(source):
        lora = lora_of(source)
        sizes = {"adapter of rank": lora.rank, "alpha": lora.alpha, "matrices": len(lora.targets)}
        return {"architecture": arch, "sizes": sizes, "cannot_run": None}
    sizes = {
        name: as_json(metadata[key]) for tail, name in SIZES.items() if (key := f"{arch}.{tail}") in metadata
    }
    place, problem = str(source.path), None
    try:
        config_from_gguf(metadata, shapes, place, source.read).check_tensors(shapes, place)
    except UsageError as error:
        problem = str(error).removeprefix(f"{place}: ")
    return {"architecture": as_json(arch), "sizes": sizes, "cannot_run": problem}


def about_tokenizer(keys: GGUFKeys) -> Report | None:
    """Return kind, size and special tokens; None if there is no tokenizer."""
    if keys.tokenizer is None:
        return None
    head, ids = "tokenizer.ggml.", ("bos_token_id", "eos_token_id")
    told: Report = {name: keys.text(f"{head}{name}") for name in ("model", "pre")}
    told |= {name: keys.whole(f"{head}{name}") for name in ids}
    counted = {name: keys.texts(f"{head}{name}") for name in ("tokens", "merges")}
    found: Report = {"bytes": ByteTokenizer.is_in(keys.metadata, keys.place)}
    found |= {name: as_json(value) for name, value in told.items() if value is not None}
    return found | {name: len(value) for name, value in counted.items() if value is not None}


def about_types(rows: Sequence[Tensor]) -> list[Report]:
    """Return per type of tensors how many there are, and their bytes."""
    counts, nbytes = Counter[str](), Counter[str]()
    for tensor in rows:
        counts[tensor.spec.type.name] += 1
        nbytes[tensor.spec.type.name] += tensor.spec.nbytes
    return [{"type": kind, "tensors": count, "bytes": nbytes[kind]} for kind, count in counts.most_common()]


def about_tensor(tensor: Tensor) -> Report:
    """Return one line of the table."""
    spec = tensor.spec
    about = {"name": spec.name, "shape": list(spec.shape), "type": spec.type.name, "bytes": spec.nbytes}
    return about | {"digest": tensor.digest, "not_finite": tensor.not_finite}


def about_keys(metadata: Mapping[str, Any], everything: bool) -> Report:
    """Return the keys that are not reported elsewhere, long values cut, unless all is wanted."""
    own = f"{metadata.get('general.architecture')}."
    return {
        key: as_json(value, everything)
        for key, value in metadata.items()
        if everything or not key.startswith((*SUMMARISED, own))
    }


def about_training(subject: Subject) -> Report | None:
    """Return the progress of a zero_mpi run; None for a file of another program."""
    metadata = [part.metadata for part in subject.parts.values()][-1]
    if ID not in metadata:
        return None
    from zero_mpi.checkpoint.state import COUNTS, read_json  # slow, and few files need it

    found = {name: as_json(metadata[key]) for key, name in COUNTS.items() if key in metadata}
    found |= {
        "id": as_json(metadata[ID], True),
        "recorded_state_digest": as_json(metadata.get(STATE_DIGEST), True),
    }
    if subject.state is not None:
        for name in ("settings", "plan", "machine"):
            with suppress(UsageError):  # the verdict reports a missing part of the pair
                values = read_json(subject.state, f"training.{name}")
                found[name] = {key: as_json(value, True) for key, value in values.items()}
    return found


def as_json(value: Any, everything: bool = False) -> Any:
    """Return a key's value for JSON and people; long texts and arrays are cut unless all is wanted."""
    if isinstance(value, np.ndarray | list):
        part = value if everything else value[:FEW]
        if isinstance(part, np.ndarray) and part.dtype.kind in "biu":
            part = part.tolist()  # at once: there may be millions
        items = [as_json_scalar(item, everything) for item in part]
        if everything or len(value) <= FEW:
            return items
        kind = "strings" if isinstance(value, list) else str(value.dtype)
        return {"array": kind, "length": len(value), "first": items}
    return as_json_scalar(value, everything)


def as_json_scalar(value: Any, everything: bool) -> Any:
    """Return a single value; a float as short as its type allows."""
    if isinstance(value, np.generic):
        value = float(str(value)) if isinstance(value, np.floating) else value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if isinstance(value, str) and len(value) > LONG and not everything:
        return f"{value[:LONG]}..."
    return value if value is None or isinstance(value, str | int | float) else "..."
