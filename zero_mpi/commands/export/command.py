"""`zero-mpi export SOURCE TARGET --type q8_0`: a model in another type or format, in one process.

Tensors pass through in pieces, so a model of any size takes a few MiB. The result is written beside its
place, flushed to disk and renamed: TARGET is complete, or it is not there.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from zero_mpi.checkpoint.folders import replace_folder, sync_folder
from zero_mpi.checkpoint.gguf.header import GGUFStream
from zero_mpi.checkpoint.huggingface.folder import CONFIG, HuggingFaceFolder
from zero_mpi.checkpoint.huggingface.peft import PEFT_CONFIG, PEFT_MODEL
from zero_mpi.checkpoint.merged import MergedWeights, adapter_source, is_adapter_file, open_merged
from zero_mpi.checkpoint.weights import WeightSource, open_weights
from zero_mpi.cli.parser import Parser
from zero_mpi.commands.export.encode import FILE_TYPES, encoded, kind_of
from zero_mpi.commands.export.huggingface import ends_of
from zero_mpi.commands.export.safetensors_folder import (
    COPIED,
    DTYPES,
    TOKENIZER,
    Kinds,
    write_folder,
    write_peft,
)
from zero_mpi.data import tokenizer_from_json
from zero_mpi.data.tokenizers.huggingface_rules import rules_in_words
from zero_mpi.errors import JobError, UsageError
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.files.open import is_file, is_folder, refusing
from zero_mpi.launch.world import World, run
from zero_mpi.models import config_from_gguf

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
OUTDATED = ("training.checkpoint_id", "training.tensor_digests", "training.state_digest")
SHARD_SIZE = "5GB"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def make_parser() -> Parser:
    """Make the parser of the command line."""
    parser = Parser(
        prog="zero-mpi export",
        description="Convert a model to another type or format, in one process.",
        epilog="Examples:\n\n"
        "  zero-mpi export runs/default/latest model-q8.gguf --type q8_0\n"
        "  zero-mpi export runs/default/latest model-q4.gguf --type q4_0\n"
        "  zero-mpi export runs/default/latest folder --format safetensors\n"
        "  zero-mpi export runs/adapter/latest peft-folder --base MODEL.gguf",
    )
    parser.add_argument("source", help="GGUF file, checkpoint folder, Hugging Face or PEFT folder")
    parser.add_argument("target", help="NAME.gguf, or folder for safetensors")
    parser.add_argument("--merge", metavar="FILE", help="adapter to merge into the weights")
    parser.add_argument("--base", metavar="PATH", help="base model, if the source is an adapter")
    parser.add_argument("--type", default="f32", choices=tuple(FILE_TYPES), help="dtype of matrices")
    parser.add_argument(
        "--pure", action="store_true", help="4- or 5-bit types also for embedding and head (otherwise Q8_0)"
    )
    parser.add_argument(
        "--format", choices=("gguf", "safetensors"), help="format (default: from the name of the target)"
    )
    parser.add_argument("--shard-size", default=SHARD_SIZE, help="maximum size of a safetensors file")
    parser.add_argument("--force", action="store_true", help="overwrite an existing target")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Write the target and print one line about it. Return the exit status."""
    options = make_parser().parse_args(arguments)
    target, shard = Path(options.target), size_of(options.shard_size)
    as_gguf = (options.format or ("gguf" if target.suffix == ".gguf" else "safetensors")) == "gguf"
    if as_gguf and options.shard_size != SHARD_SIZE:
        raise UsageError(f"--shard-size {options.shard_size}: a GGUF is one file; leave it out")
    with refusing("", target):
        check_target(target, as_gguf, options.type, options.force)
    write = writer(options, as_gguf, shard)
    try:
        with arriving(target) as place:
            kinds = write(place)
    except OSError as error:
        cause = error.strerror or str(error)
        raise JobError(f"{error.filename or target}: cannot be written: {cause}") from error
    print(summary(target, options.type, kinds))
    return 0


# ----------------------------------------------------------------------------------- what is asked for


def size_of(text: str) -> int:
    """Return a number of bytes such as 5GB or 200MiB; raises UsageError."""
    found = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", text)
    if not found or found[2].upper() not in UNITS or int(found[1]) < 1:
        raise UsageError(f"--shard-size {text}: expected a size such as 5GB or 200MiB")
    return int(found[1]) * UNITS[found[2].upper()]


def check_target(target: Path, as_gguf: bool, kind: str, force: bool) -> None:
    """Raise UsageError unless the target may be written: --force replaces a model, and nothing else."""
    above = target.absolute().parent
    if not is_folder(above):
        raise UsageError(f"{target}: the folder {above} does not exist: create it")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"{shown(target)}: cannot be written: Permission denied: {shown(above)}")
    if not as_gguf and (kind not in DTYPES or target.suffix in (".safetensors", ".gguf")):
        what = f"--type {kind}" if kind not in DTYPES else str(target)
        raise UsageError(f"{what}: safetensors is a folder of f32, f16 or bf16: use another name or type")
    if is_folder(target) and not target.is_symlink():
        ours = (CONFIG, *COPIED, PEFT_CONFIG, PEFT_MODEL)
        names = [name for name in sorted(os.listdir(target)) if name not in ours]
        foreign = next((name for name in names if not WEIGHTS.fullmatch(name)), None)
        if as_gguf or foreign:
            found = f"a folder with {show(foreign)}" if foreign else "a folder"
            raise UsageError(f"{target}: expected a new name or a model, found {found}: use another name")
        if not os.listdir(target):
            return
    if os.path.lexists(target) and not force:
        raise UsageError(f"{target}: already exists: use another name, or --force to replace it")
    if os.path.lexists(target) and not is_folder(target) and not (as_gguf and is_file(target)):
        raise UsageError(f"{target}: not a model, so --force does not replace it: use another name")


def writer(options: Namespace, as_gguf: bool, most: int) -> Callable[[Path], Kinds]:
    """Return the writer of the requested target; raises UsageError for a source that it cannot convert."""
    kind = options.type
    if options.base is None:
        source = open_source(options.source, as_gguf, options.merge)
        if as_gguf:
            return partial(write_gguf, source, kind, options.pure)
        return partial(write_folder, source, kind, most)
    for name, given in (("--merge", options.merge), ("--type", kind if as_gguf and kind != "f32" else None)):
        if given is not None:
            raise UsageError(
                f"{name} {given}: cannot be combined with --base, which converts only the adapter"
            )
    base = open_weights(options.base)
    adapter = adapter_source(options.source, base.metadata)
    MergedWeights(base, adapter)  # raises if it does not fit
    if as_gguf:
        return partial(write_gguf, adapter, kind, False)
    return partial(write_peft, adapter, base, kind)


def open_source(path: str, as_gguf: bool, adapter: str | None) -> WeightSource:
    """Return the source; raises UsageError unless it is a model that the target's format can hold."""
    source = open_merged(path, adapter)
    architecture = GGUFKeys(source.metadata, str(source.path)).architecture
    if architecture is None or architecture == "zero_mpi":
        found = "none" if architecture is None else "a training state: use its model.gguf"
        raise UsageError(f"{source.path}: expected a model with its architecture, found {found}")
    if is_adapter_file(source):
        raise UsageError(f"{source.path}: is an adapter: add --base with the model that it was trained on")
    if not as_gguf or isinstance(source, HuggingFaceFolder):
        shapes = {name: spec.shape for name, spec in source.tensors.items()}
        config_from_gguf(source.metadata, shapes, path, source.read).check_tensors(shapes, path)
    return source


# ----------------------------------------------------------------------------------------- a GGUF file


def write_gguf(source: WeightSource, wanted: str, pure: bool, path: Path) -> Kinds:
    """Write a GGUF file. Return the type of each tensor."""
    kind = GGMLQuantizationType[wanted.upper()]
    kinds = {name: kind_of(spec, kind, pure) for name, spec in source.tensors.items()}
    table = [(name, spec.shape, kinds[name]) for name, spec in source.tensors.items()]
    metadata = gguf_metadata(source, wanted)
    with GGUFStream(path, metadata["general.architecture"], metadata, table) as stream:
        for name, spec in source.tensors.items():
            stream.write_raw(name, encoded(source, spec, kinds[name]))
    return {name: kind.name.lower() for name, kind in kinds.items()}


def gguf_metadata(source: WeightSource, wanted: str) -> dict[str, Any]:
    """Return the source's keys that are still true, and the tokenizer's if it lies in a folder."""
    keys = {name: value for name, value in source.metadata.items() if name not in OUTDATED}
    keys["general.file_type"] = np.uint32(FILE_TYPES[wanted])
    if wanted.startswith("q"):
        keys["general.quantization_version"] = np.uint32(2)
    if isinstance(source, HuggingFaceFolder):
        keys |= tokenizer_keys(source)
    if rules := rules_in_words(keys):
        why = "it may tokenize some text differently"
        print(
            f"zero_mpi export: warning: llama.cpp does not follow the tokenizer's {rules}: {why}",
            file=sys.stderr,
        )
    return keys | ends_of(keys, str(source.path))[1]


def tokenizer_keys(source: HuggingFaceFolder) -> dict[str, Any]:
    """Return the keys of the tokenizer in a folder; without one, llama.cpp's key for no tokenizer."""
    path = source.path / TOKENIZER
    if not path.exists():
        return {"tokenizer.ggml.model": "none"}
    return tokenizer_from_json(path, source.tensors["token_embd.weight"].shape[0]).metadata()


# ------------------------------------------------------------------------------------------ the target


@contextmanager
def arriving(target: Path) -> Iterator[Path]:
    """Yield a name beside `target` for a file or folder; in the end it replaces the target or is removed."""
    place = target.with_name(f".{target.name}.partial")
    remove(place)
    try:
        yield place
        if place.is_dir():
            sync_folder(place)
        if place.is_dir() and target.exists():
            replace_folder(place, target)  # now one of these names is the old folder's
            remove(place)
            remove(target.with_name(f".{target.name}.old"))
        else:
            place.replace(target)
        sync_folder(target.absolute().parent)
    except BaseException:
        remove(place)
        raise


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def summary(target: Path, wanted: str, kinds: Kinds) -> str:
    """Return file, type, size, tensors by type; and matrices of another type than the wanted one, and why."""
    files = [target, *target.iterdir()] if target.is_dir() else [target]
    size = sum(file.stat().st_size for file in files if file.is_file())
    count = Counter(kinds.values())
    counts = ", ".join(f"{number} {kind}" for kind, number in count.most_common())
    text = f"{target}: {wanted}, {size / 1e6:.1f} MB, {len(kinds)} tensors ({counts})"
    finer = [name for name, kind in kinds.items() if kind == "q8_0" != wanted]
    text += f"; q8_0: {', '.join(finer)} (--pure: {wanted})" if finer else ""
    fallen = count["f16"] if wanted.startswith("q") else 0
    return text + (f"; f16 where the row length is not a multiple of 32: {fallen}" if fallen else "")


def main() -> None:
    """Run the command."""
    run("export", command, sys.argv[1:], alone=True)
