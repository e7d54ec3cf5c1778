"""Report on a model file or checkpoint: its description and the results of checks, as values for JSON.

Each tensor is read once, in chunks, to compute its digest and to count values that are not finite. So memory
does not grow with the model. A checkpoint of zero_mpi is checked against its digests. The digest of its
full state does not depend on the number of ranks that wrote it.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from zero_mpi.checkpoint import folders, sound
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.huggingface.families import Order
from zero_mpi.checkpoint.huggingface.folder import HuggingFaceFolder, HuggingFaceTensor
from zero_mpi.checkpoint.state import ARCHITECTURE, COUNTS, STATE, read_json
from zero_mpi.checkpoint.tensor_file import NATIVE, TensorSpec, decode
from zero_mpi.checkpoint.weights import WeightSource, is_adapter_file, keys_of, lora_of, open_weights
from zero_mpi.data import ByteTokenizer
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import TEMPLATE, GGUFKeys
from zero_mpi.models import config_from_gguf
from zero_mpi.ops.block_kinds import BLOCK_KINDS, SCALES, finite_blocks

Report = dict[str, Any]
READ_AT_ONCE = 1 << 20  # bytes that are read at once
LONG, FEW = 60, 3  # default limits: characters of a text, items of an array
SIZES = {  # key of an architecture -> name in the report
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


@dataclass(frozen=True)
class Subject:
    """An opened path: a model, a training state, or a checkpoint with both and maybe a moving average."""

    model: WeightSource | None
    state: GGUFFile | None
    average: GGUFFile | None = None

    @property
    def parts(self) -> dict[str, WeightSource]:
        parts = {sound.MODEL: self.model, sound.AVERAGE: self.average, STATE: self.state}
        return {role: part for role, part in parts.items() if part is not None}


@dataclass(frozen=True)
class Tensor:
    """Results of reading a tensor: its digest, and how many values are not finite (None: unknown)."""

    spec: TensorSpec
    digest: str
    not_finite: int | None

    def as_json(self) -> Report:
        spec = self.spec
        facts = {"name": spec.name, "shape": list(spec.shape), "type": spec.type.name, "bytes": spec.nbytes}
        return facts | {"digest": self.digest, "not_finite": self.not_finite}


def open_subject(path: Path) -> Subject:
    """Open `path`, or the newest checkpoint of a run folder. Raise UsageError if it cannot be read."""
    newest = path / folders.LATEST
    if not os.path.exists(folders.weights_in(path)) and os.path.exists(folders.weights_in(newest)):
        path = newest
    adapter = path / folders.ADAPTER
    source = open_weights(adapter if os.path.exists(adapter) else path)
    if isinstance(source, GGUFFile) and keys_of(source).architecture == ARCHITECTURE:
        return Subject(None, source)
    if not os.path.exists(path / folders.OPTIMIZER):
        return Subject(source, None)
    state = GGUFFile.open(path / folders.OPTIMIZER)
    return Subject(source, state, sound.average_of(state))


# --------------------------------------------------------------------------------------- tensors, in pieces


def pieces(source: WeightSource, spec: TensorSpec, like_gguf: bool = False) -> Iterator[Any]:
    """Yield the stored bytes of a tensor, in GGUF's order, in chunks that end where digest chunks end.

    like_gguf: whether to add 1 to float32 norms that a folder stores as w - 1; rounding may hide differences
    """
    block, width = GGML_QUANT_SIZES[spec.type]
    step = math.lcm(sound.PIECE_BYTES, width)
    size = max(1, READ_AT_ONCE // step) * step
    if isinstance(source, GGUFFile):
        yield from source.raw_chunks(spec.name, size)
        return
    if (
        isinstance(source, HuggingFaceFolder)
        and isinstance(spec, HuggingFaceTensor)
        and spec.order == Order.LESS_ONE
        and not (like_gguf and spec.type == GGMLQuantizationType.F32)
    ):
        yield from source.weights.raw_chunks(spec.source, size)
        return
    for start in range(0, spec.size, size // width * block):  # `read` gives float32, `astype` the stored type
        values = source.read(spec.name, start, min(start + size // width * block, spec.size))
        yield values.astype(NATIVE[spec.type]).view(np.uint8).data


def elements(raw: Any, kind: GGMLQuantizationType) -> Any:
    """Return the values of a chunk, or None if its type is unknown."""
    if kind.name in ("I8", "I16", "I32", "I64", "F64"):
        return np.frombuffer(raw, f"<{kind.name.lower()[0]}{int(kind.name[1:]) // 8}")
    try:
        return decode(np.frombuffer(raw, np.uint8), kind)
    except NotImplementedError:
        return None


def not_finite(raw: Any, kind: GGMLQuantizationType) -> int | None:
    """Return how many values of a chunk are not finite; None for an unknown type.

    Only blocks whose scales are not finite are decoded, because all other blocks have finite values.
    """
    if kind.name in SCALES:
        blocks = np.frombuffer(raw, np.uint8)
        odd = blocks.reshape(-1, BLOCK_KINDS[kind.name].nbytes)[~finite_blocks(blocks, kind.name)]
        if not odd.size:
            return 0
        raw = odd.tobytes()
    values = elements(raw, kind)
    return None if values is None else values.size - int(np.count_nonzero(np.isfinite(values)))


def read_tensor(source: WeightSource, spec: TensorSpec) -> Tensor:
    """Return the digest of a tensor and its number of non-finite values, reading it once."""
    counts = list[int | None]()

    def digested() -> Iterator[bytes]:
        for raw in pieces(source, spec):
            counts.append(not_finite(raw, spec.type))
            yield sound.piece_digests(raw)

    digest = sound.digest_of_pieces(digested())
    numbers = [count for count in counts if count is not None]
    return Tensor(spec, digest, sum(numbers) if len(numbers) == len(counts) else None)


# ------------------------------------------------------------------------------------------------ the report


def examine(path: Path, *, keys: bool = False, tensors: bool = False) -> Report:
    """Return the report on a path. On request it has all keys, or a row for each tensor."""
    subject = open_subject(path)
    parts = subject.parts
    results = {
        role: [read_tensor(part, spec) for spec in part.tensors.values()] for role, part in parts.items()
    }
    facts: Report = {"path": str(path), "files": [about_file(part) for part in parts.values()]}
    if subject.model is not None:
        facts["model"] = about_model(subject.model)
        facts["tokenizer"] = about_tokenizer(keys_of(subject.model))
    facts["types"] = about_types([row.spec for rows in results.values() for row in rows])
    facts["keys"] = {role: about_keys(part.metadata, keys) for role, part in parts.items()}
    facts["training"] = about_training(subject)
    facts |= verdict(subject, results)
    if tensors:
        facts["tensors"] = {role: [row.as_json() for row in rows] for role, rows in results.items()}
    return facts


def about_types(specs: Sequence[TensorSpec]) -> list[Report]:
    """Return the number of tensors and of bytes of each type, the most frequent type first."""
    counts, nbytes = Counter(spec.type.name for spec in specs), Counter[str]()
    for spec in specs:
        nbytes[spec.type.name] += spec.nbytes
    return [{"type": kind, "tensors": n, "bytes": nbytes[kind]} for kind, n in counts.most_common()]


def about_file(source: WeightSource) -> Report:
    """Return the name and the size of a file, of a split file or of a folder."""
    specs = source.tensors.values()
    common = {"path": str(source.path), "tensors": len(specs), "elements": sum(spec.size for spec in specs)}
    if isinstance(source, GGUFFile):
        return common | {"format": "GGUF", "bytes": source.nbytes, "parts": len(source.parts)}
    return common | {"format": "safetensors", "bytes": sum(spec.nbytes for spec in specs), "parts": 1}


def about_model(source: WeightSource) -> Report:
    """Return architecture and sizes, read from the keys, and the reason if zero_mpi cannot run the model."""
    metadata, shapes = source.metadata, {name: spec.shape for name, spec in source.tensors.items()}
    arch = keys_of(source).architecture
    keys = {name: f"{arch}.{tail}" for tail, name in SIZES.items()}
    sizes = {name: as_json(metadata[key]) for name, key in keys.items() if key in metadata}
    place, problem = str(source.path), None
    try:
        if isinstance(source, GGUFFile) and is_adapter_file(source):
            lora = lora_of(source)
            sizes = {"adapter of rank": lora.rank, "alpha": lora.alpha, "matrices": len(lora.targets)}
        else:
            config_from_gguf(metadata, shapes, place, source.read).check_tensors(shapes, place)
    except UsageError as error:
        problem = str(error).removeprefix(f"{place}: ")
    return {"architecture": as_json(arch), "sizes": sizes, "cannot_run": problem}


def about_tokenizer(keys: GGUFKeys) -> Report | None:
    """Return a tokenizer's kind, sizes and special tokens, and whether it has a chat template; None: none."""
    if keys.tokenizer is None:
        return None
    head = "tokenizer.ggml."
    fields: Report = {"bytes": ByteTokenizer.is_in(keys.metadata, keys.place)}
    fields |= {name: keys.text(f"{head}{name}") for name in ("model", "pre")}
    fields |= {name: keys.integer(f"{head}{name}") for name in ("bos_token_id", "eos_token_id")}
    lists = {name: keys.texts(f"{head}{name}") for name in ("tokens", "merges")}
    fields["chat_template"] = TEMPLATE in keys.metadata
    report = {name: as_json(value) for name, value in fields.items() if value is not None}
    return report | {name: len(value) for name, value in lists.items() if value is not None}


def about_keys(metadata: Mapping[str, Any], everything: bool) -> Report:
    """Return the keys that the report does not show elsewhere, with long values cut; all if `everything`."""
    heads = () if everything else (*SUMMARISED, f"{metadata.get('general.architecture')}.")
    return {key: as_json(value, everything) for key, value in metadata.items() if not key.startswith(heads)}


def about_training(subject: Subject) -> Report | None:
    """Return the progress of the run that wrote a checkpoint; None for a file of another program."""
    metadata = [part.metadata for part in subject.parts.values()][-1]
    if sound.ID not in metadata:
        return None
    report = {name: as_json(metadata[key]) for key, name in COUNTS.items() if key in metadata}
    report["id"] = as_json(metadata[sound.ID], True)
    report["recorded_state_digest"] = as_json(metadata.get(sound.STATE_DIGEST), True)
    if subject.state is not None:
        for name in ("settings", "plan", "machine"):
            with suppress(UsageError):  # `verdict` reports keys that were removed or changed
                values = read_json(subject.state, f"training.{name}")
                report[name] = {key: as_json(value, True) for key, value in values.items()}
    return report


def verdict(subject: Subject, results: Mapping[str, list[Tensor]]) -> Report:
    """Return the problems of digests and of the checkpoint's files, and the number of non-finite values."""
    digests = {role: {tensor.spec.name: tensor.digest for tensor in rows} for role, rows in results.items()}
    tensors = [*chain.from_iterable(results.values())]
    with_sums = [role for role, part in subject.parts.items() if sound.TENSOR_DIGESTS in part.metadata]
    state_digest = sound.digest_of_files(digests)
    problems = [text for role in with_sums for text in wrong_digests(subject.parts[role], digests[role])]
    if subject.model is not None and subject.state is not None:
        try:
            sound.check_files(sound.CheckpointFiles(subject.model, subject.state, subject.average))
            if not problems and keys_of(subject.state).text(sound.STATE_DIGEST) != state_digest:
                problems.append(f"{subject.state.path}: key {sound.STATE_DIGEST} does not match the tensors")
        except UsageError as error:
            problems.append(str(error))
    not_finite = {tensor.spec.name: tensor.not_finite for tensor in tensors if tensor.not_finite}
    return {
        "checksums": sum(len(digests[role]) for role in with_sums),
        "problems": problems,
        "state_digest": state_digest,
        "not_finite": not_finite,
        "unknown_types": sorted({tensor.spec.type.name for tensor in tensors if tensor.not_finite is None}),
        "sound": not problems and not not_finite,
    }


def wrong_digests(source: WeightSource, digests: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each tensor of a file that does not match its digest in the file."""
    path = source.path
    try:
        recorded = sound.from_lines(keys_of(source).texts(sound.TENSOR_DIGESTS))
    except UsageError as error:
        yield str(error)
        return
    for name in dict.fromkeys((*digests, *recorded)):
        if name not in recorded:
            yield f"{path}: tensor {show(name)} has no checksum, but other tensors do"
        elif name not in digests:
            yield f"{path}: tensor {show(name)} has a checksum but is missing"
        elif digests[name] != recorded[name]:
            yield f"{path}: tensor {show(name)} was changed after it was written: its checksum differs"


def as_json(value: Any, everything: bool = False) -> Any:
    """Return a key's value in a form for JSON. Long texts and arrays are cut unless `everything`."""
    if isinstance(value, np.ndarray | list):
        part = value if everything else value[:FEW]
        if isinstance(part, np.ndarray) and part.dtype.kind in "biu":
            part = part.tolist()  # one call, because there may be millions of items
        items = [as_json(item, everything) for item in part]
        if everything or len(value) <= FEW:
            return items
        kind = "strings" if isinstance(value, list) else str(value.dtype)
        return {"array": kind, "length": len(value), "first": items}
    if isinstance(value, np.generic):
        value = float(str(value)) if isinstance(value, np.floating) else value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN or infinity
    if isinstance(value, str) and len(value) > LONG and not everything:
        return f"{value[:LONG]}..."
    return value if value is None or isinstance(value, str | int | float) else "..."
