"""`python -m zero_mpi.export SOURCE TARGET --type q8_0`: a model in another type or format, in one process.

Tensors pass through in pieces, so a model of any size takes a few MiB. The result is written beside its
place, brought to disk and renamed: TARGET is whole, or it is not there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from zero_mpi.checkpoint.folders import replace_folder, sync_folder
from zero_mpi.checkpoint.gguf.writer import GGUFStream
from zero_mpi.checkpoint.huggingface.folder import CONFIG, HuggingFaceFolder
from zero_mpi.checkpoint.merged import open_merged
from zero_mpi.checkpoint.safetensors import INDEX, SINGLE, SafetensorsStream
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.cli.parser import Parser
from zero_mpi.data import tokenizer_config, tokenizer_from_json, tokenizer_json
from zero_mpi.errors import JobError, UsageError
from zero_mpi.export.encode import FILE_TYPES, encoded, encoded_pieces, kind_of
from zero_mpi.export.huggingface import Outgoing, config_json, outgoing
from zero_mpi.files.atomic import write_to_disk
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.files.open import is_file, is_folder, read_file, refusing
from zero_mpi.launch.world import World, run
from zero_mpi.models import config_from_gguf

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # what safetensors can hold of our types
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
COPIED = (  # from one Hugging Face folder to the next
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
OUTDATED = ("training.checkpoint_id", "training.tensor_digests", "training.state_digest")
SHARD_SIZE = "5GB"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def make_parser() -> Parser:
    """The parser of the command line."""
    parser = Parser(
        prog="python -m zero_mpi.export",
        description="Write a model in another type or format, in one process.",
        epilog="Examples:\n\n"
        "  python -m zero_mpi.export runs/default/latest model-q8.gguf --type q8_0\n"
        "  python -m zero_mpi.export runs/default/latest model-q4.gguf --type q4_0\n"
        "  python -m zero_mpi.export runs/default/latest folder --format safetensors",
    )
    parser.add_argument("source", help="GGUF file, checkpoint folder, or Hugging Face folder")
    parser.add_argument("target", help="NAME.gguf, or a folder for safetensors")
    parser.add_argument("--merge", metavar="FILE", help="adapter whose products are added to the weights")
    parser.add_argument("--type", default="f32", choices=tuple(FILE_TYPES), help="of the matrices")
    parser.add_argument("--pure", action="store_true", help="4 or 5 bits for embedding and head too, not 8")
    parser.add_argument("--format", choices=("gguf", "safetensors"), help="if the target does not tell")
    parser.add_argument("--shard-size", default=SHARD_SIZE, help="most bytes in a safetensors file")
    parser.add_argument("--force", action="store_true", help="replace the target if it is there")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Write the target and say in one line what it is."""
    options = make_parser().parse_args(arguments)
    if world.size > 1:
        raise UsageError("export runs in one process: leave mpirun out")
    target, shard = Path(options.target), size_of(options.shard_size)
    as_gguf = (options.format or ("gguf" if target.suffix == ".gguf" else "safetensors")) == "gguf"
    if as_gguf and options.shard_size != SHARD_SIZE:
        raise UsageError(f"--shard-size {options.shard_size}: a GGUF is one file; leave it out")
    with refusing("", target):
        check_target(target, as_gguf, options.type, options.force)
    source = open_source(options.source, as_gguf, options.merge)
    try:
        with arriving(target) as partial:
            kinds = (
                write_gguf(source, partial, options.type, options.pure)
                if as_gguf
                else write_folder(source, partial, options.type, shard)
            )
    except OSError as error:
        cause = error.strerror or str(error)
        raise JobError(f"{error.filename or target}: cannot be written: {cause}") from error
    print(summary(target, options.type, kinds))
    return 0


# ----------------------------------------------------------------------------------- what is asked for


def size_of(text: str) -> int:
    """A number of bytes such as 5GB or 200MiB; raises UsageError."""
    found = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", text)
    if not found or found[2].upper() not in UNITS or int(found[1]) < 1:
        raise UsageError(f"--shard-size {text}: expected a size such as 5GB or 200MiB")
    return int(found[1]) * UNITS[found[2].upper()]


def check_target(target: Path, as_gguf: bool, kind: str, force: bool) -> None:
    """Raise UsageError unless the target may be written: --force replaces a model, and nothing else."""
    above = target.absolute().parent
    if not is_folder(above):
        raise UsageError(f"{target}: expected a folder to put it in, found none: make {above}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"{shown(target)}: cannot be written: Permission denied: {shown(above)}")
    if not as_gguf and (kind not in DTYPES or target.suffix in (".safetensors", ".gguf")):
        what = f"--type {kind}" if kind not in DTYPES else str(target)
        raise UsageError(f"{what}: safetensors is a folder of f32, f16 or bf16: take another name or type")
    if is_folder(target) and not target.is_symlink():
        names = [name for name in sorted(os.listdir(target)) if name not in (CONFIG, *COPIED)]
        foreign = next((name for name in names if not WEIGHTS.fullmatch(name)), None)
        if as_gguf or foreign:
            found = f"a folder with {show(foreign)}" if foreign else "a folder"
            raise UsageError(f"{target}: expected a place for a model, found {found}: take another name")
        if not os.listdir(target):
            return
    if os.path.lexists(target) and not force:
        raise UsageError(f"{target}: is there already: take another name, or --force to replace it")
    if os.path.lexists(target) and not is_folder(target) and not (as_gguf and is_file(target)):
        raise UsageError(f"{target}: expected a model to replace, found something else: take another name")


def open_source(path: str, as_gguf: bool, adapter: str | None) -> WeightSource:
    """The source; raises UsageError unless it is a model, and one that the target's format can say."""
    source = open_merged(path, adapter)
    architecture = GGUFKeys(source.metadata, str(source.path)).architecture
    if architecture is None or architecture == "zero_mpi":
        found = "none" if architecture is None else "the state of a training: give its model.gguf"
        raise UsageError(f"{source.path}: expected a model with its architecture, found {found}")
    if not as_gguf or isinstance(source, HuggingFaceFolder):
        shapes = {name: spec.shape for name, spec in source.tensors.items()}
        config_from_gguf(source.metadata, shapes, path, source.read).check_tensors(shapes, path)
    return source


# ----------------------------------------------------------------------------------------- a GGUF file

Kinds = dict[str, str]  # by the name of the tensor


def write_gguf(source: WeightSource, path: Path, wanted: str, pure: bool) -> Kinds:
    """Write a GGUF file. Returns the type of each tensor."""
    kind = GGMLQuantizationType[wanted.upper()]
    kinds = {name: kind_of(spec, kind, pure) for name, spec in source.tensors.items()}
    table = [(name, spec.shape, kinds[name]) for name, spec in source.tensors.items()]
    metadata = gguf_metadata(source, wanted)
    with GGUFStream(path, metadata["general.architecture"], metadata, table) as stream:
        for name, spec in source.tensors.items():
            stream.write_raw(name, encoded(source, spec, kinds[name]))
    return {name: kind.name.lower() for name, kind in kinds.items()}


def gguf_metadata(source: WeightSource, wanted: str) -> dict[str, Any]:
    """The source's keys, but for what is no longer true, and the tokenizer's where it lies in a folder."""
    keys = {name: value for name, value in source.metadata.items() if name not in OUTDATED}
    keys["general.file_type"] = np.uint32(FILE_TYPES[wanted])
    if wanted.startswith("q"):
        keys["general.quantization_version"] = np.uint32(2)
    if isinstance(source, HuggingFaceFolder):
        keys |= tokenizer_keys(source)
    return keys


def tokenizer_keys(source: HuggingFaceFolder) -> dict[str, Any]:
    """The keys of the tokenizer in a folder; without one, the key by which llama.cpp does without too."""
    path = source.path / TOKENIZER
    if not path.exists():
        return {"tokenizer.ggml.model": "none"}
    return tokenizer_from_json(path, source.tensors["token_embd.weight"].shape[0]).metadata()


# ------------------------------------------------------------------------------- a Hugging Face folder


def write_folder(source: WeightSource, folder: Path, wanted: str, most: int) -> Kinds:
    """Write configuration, tensors and tokenizer into a new folder. Returns the type of each tensor."""
    config, tensors = config_json(source, DTYPES[wanted]), outgoing(source)
    folder.mkdir()
    write_json(folder / CONFIG, config)
    kind = GGMLQuantizationType[wanted.upper()]
    width = 4 if wanted == "f32" else 2
    parts = in_parts(tensors, most // width)
    names = [SINGLE]
    if len(parts) > 1:
        names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
        where = {tensor.name: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = width * sum(tensor.spec.size for tensor in tensors)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    for name, part in zip(names, parts, strict=True):
        write_part(folder / name, part, kind)
    write_tokenizer(source, folder)
    return {tensor.name: wanted for tensor in tensors}


def in_parts(tensors: Sequence[Outgoing], most: int) -> list[list[Outgoing]]:
    """The tensors in their order, cut into files of at most `most` elements, or of one tensor."""
    parts: list[list[Outgoing]] = [[]]
    filled = 0
    for tensor in tensors:
        if parts[-1] and filled + tensor.spec.size > most:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.spec.size
    return parts


def write_part(path: Path, tensors: Sequence[Outgoing], kind: GGMLQuantizationType) -> None:
    """Write one safetensors file."""
    with SafetensorsStream(path, [(tensor.name, kind.name, tensor.shape) for tensor in tensors]) as stream:
        for tensor in tensors:
            what = f"{tensor.source.path}: tensor {show(tensor.spec.name)}"
            stream.write_raw(tensor.name, encoded_pieces(what, tensor.pieces(), kind))


def write_tokenizer(source: WeightSource, folder: Path) -> None:
    """The tokenizer's files, from a folder or from keys; none where there is no tokenizer to write."""
    if isinstance(source, HuggingFaceFolder):
        for name in COPIED:
            if os.path.isfile(source.path / name):
                write_to_disk(folder / name, read_file(source.path / name, expected="a tokenizer's file"))
    elif (keys := GGUFKeys(source.metadata, str(source.path))).tokenizer == "gpt2":
        write_json(folder / TOKENIZER, tokenizer_json(keys.metadata, keys.place))
        write_json(folder / TOKENIZER_CONFIG, tokenizer_config(keys.metadata, keys.place))


def write_json(path: Path, content: Any) -> None:
    """Write a value as JSON text."""
    write_to_disk(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


# ------------------------------------------------------------------------------------------ the target


@contextmanager
def arriving(target: Path) -> Iterator[Path]:
    """A name beside `target` for a file or folder; it takes the target's place at the end, or is removed."""
    partial = target.with_name(f".{target.name}.partial")
    remove(partial)
    try:
        yield partial
        if partial.is_dir():
            sync_folder(partial)
        if partial.is_dir() and target.exists():
            replace_folder(partial, target)  # now one of these names is the old folder's
            remove(partial)
            remove(target.with_name(f".{target.name}.old"))
        else:
            partial.replace(target)
        sync_folder(target.absolute().parent)
    except BaseException:
        remove(partial)
        raise


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def summary(target: Path, wanted: str, kinds: Kinds) -> str:
    """File, type, size, tensors by type; and the matrices that have another type than was wanted, and why."""
    files = [target, *target.iterdir()] if target.is_dir() else [target]
    size = sum(file.stat().st_size for file in files if file.is_file())
    count = Counter(kinds.values())
    counts = ", ".join(f"{number} {kind}" for kind, number in count.most_common())
    text = f"{target}: {wanted}, {size / 1e6:.1f} MB, {len(kinds)} tensors ({counts})"
    finer = [name for name, kind in kinds.items() if kind == "q8_0" != wanted]
    text += f"; q8_0: {', '.join(finer)} (--pure: {wanted})" if finer else ""
    fallen = count["f16"] if wanted.startswith("q") else 0
    return text + (f"; f16 where rows do not fill blocks of 32: {fallen}" if fallen else "")


def main() -> None:
    """The entry point of the command."""
    run("export", command, sys.argv[1:], alone=True)
