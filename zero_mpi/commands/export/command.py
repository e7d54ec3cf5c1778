"""`zero-mpi export SOURCE TARGET --type q8_0`: converts a model, on any number of ranks, to a type or format.

Tensors are converted in chunks, so a model of any size takes only a few MiB of memory. The result is written
next to TARGET, flushed to disk and renamed, so TARGET is never incomplete.
"""

import os
import re
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi import environment
from zero_mpi.checkpoint import mixes, weights
from zero_mpi.checkpoint.folders import OPTIMIZER, moved_aside, put, sync_folder
from zero_mpi.checkpoint.gguf.index import CHECKPOINT_ID
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.huggingface.folder import CONFIG, PEFT_CONFIG, PEFT_MODEL
from zero_mpi.checkpoint.importance import read_importance
from zero_mpi.checkpoint.tensor_file import Metadata
from zero_mpi.cli.parser import Once, Parser
from zero_mpi.commands.export import huggingface
from zero_mpi.commands.export.gguf_files import Encoder, PlannedFile, create, fill, plan_files
from zero_mpi.data import tokenizer_from_json
from zero_mpi.data.tokenizers.huggingface_rules import rules_in_words
from zero_mpi.errors import UsageError, naming, writing
from zero_mpi.files.atomic import partial_of
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.files.open import is_file, is_folder, refusing
from zero_mpi.launch.world import World, run
from zero_mpi.models import config_from_gguf
from zero_mpi.ops import ggml

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
OUTDATED_KEYS = ("training.checkpoint_id", "training.tensor_digests", "training.state_digest", mixes.QAT)
SHARD_SIZE = "5GB"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="zero-mpi export",
        description="Convert a model to another type or format. Ranks of mpirun share the work for a GGUF.",
        epilog="Examples:\n\n"
        "  zero-mpi export runs/default/latest model-q8.gguf --type q8_0\n"
        "  mpirun -n 8 zero-mpi export runs/default/latest model-q4.gguf --type q4_k_m\n"
        "  zero-mpi export runs/default/latest folder --format safetensors\n"
        "  zero-mpi export runs/adapter/latest peft-folder --base MODEL.gguf",
    )
    add = parser.add_argument
    add("source", help="GGUF file, checkpoint folder, Hugging Face or PEFT folder")
    add("target", help="NAME.gguf, or folder for safetensors")
    add("--merge", action=Once, metavar="FILE", help="adapter to merge into the weights")
    add("--base", metavar="PATH", help="base model, if the source is an adapter")
    add(
        "--type",
        default="f32",
        choices=(*mixes.FILE_TYPES, *mixes.MIXES, *mixes.ALIASES),
        help="type of matrices; q2_k and later are mixes as in llama.cpp, and need the extra ggml",
    )
    add("--imatrix", metavar="FILE", help="importance matrix, from evaluate or llama.cpp")
    add("--pure", action="store_true", help="one type for all matrices, embedding and head included")
    add("--format", choices=("gguf", "safetensors"), help="format (default: from the name of the target)")
    add("--shard-size", default=SHARD_SIZE, help="maximum size of a safetensors file")
    add("--split-size", help="maximum size of a GGUF file, e.g. 2GB (default: one file)")
    add("--force", action="store_true", help="overwrite an existing target")
    return parser


@dataclass
class Export:
    """An export that is in progress.

    place    temporary path of the result until it is renamed
    kinds    tensor name -> type
    files    files of a GGUF, which all ranks write together; empty for a folder
    """

    target: Path
    file_type: str
    kinds: huggingface.Kinds = field(default_factory=dict)
    files: list[PlannedFile] = field(default_factory=list)
    encoder: Encoder | None = None
    write: Callable[[Path], huggingface.Kinds] | None = None

    @property
    def place(self) -> Path:
        return partial_of(self.target)

    @property
    def paths(self) -> list[Path]:
        return [self.place] if len(self.files) < 2 else [self.place / file.name for file in self.files]

    @property
    def results(self) -> list[Path]:
        return [self.target.with_name(file.name) for file in self.files] or [self.target]

    def begin(self) -> None:
        """Write the folder, or create the files of a GGUF with their headers."""
        remove(self.place)
        if self.write is not None:
            self.kinds = self.write(self.place)
        if len(self.files) > 1:
            self.place.mkdir()
        for file, path in zip(self.files, self.paths, strict=False):
            create(file, path)

    def fill(self, rank: int, size: int) -> None:
        if self.encoder is not None:
            fill(self.files, self.paths, self.encoder, rank, size)

    def publish(self) -> None:
        """Rename the result to its final name. The first of several files is renamed last."""
        place, target = self.place, self.target
        if len(self.files) > 1:
            for path, result in reversed([*zip(self.paths, self.results, strict=True)]):
                path.replace(result)
            place.rmdir()
        elif place.is_dir():
            places = [place, moved_aside(target)] if target.exists() else []
            put(place, target)
            for folder in places:  # one of them is the old folder
                remove(folder)
        else:
            place.replace(target)
        sync_folder(target.absolute().parent)


def command(world: World, arguments: Sequence[str]) -> int:
    """Write the target and print one line about it. Return the exit status."""
    options = make_parser().parse_args(arguments)
    export: Export = world.run_on_all(partial(prepare, options, world.rank == 0))

    def step(action: Callable[..., None], *arguments: int) -> None:
        with writing(), naming(export.target):
            action(*arguments)

    try:
        world.on_root(partial(step, export.begin))
        world.run_on_all(partial(step, export.fill, world.rank, world.size))
        world.on_root(partial(step, export.publish))
    except BaseException:
        if world.rank == 0:
            remove(export.place)
        raise
    if world.rank == 0:
        print(summary(export))
    return 0


def prepare(options: Namespace, warns: bool) -> Export:
    """Return the requested export. Raise UsageError if it is not possible. `warns`: print warnings."""
    options.type = mixes.known_type(options.type)
    target, shard = Path(options.target), size_of("--shard-size", options.shard_size)
    as_gguf = (options.format or ("gguf" if target.suffix == ".gguf" else "safetensors")) == "gguf"
    if as_gguf and options.shard_size != SHARD_SIZE:
        raise UsageError(f"--shard-size {options.shard_size}: for safetensors only: a GGUF has --split-size")
    for name, text in (("--split-size", options.split_size), ("--imatrix", options.imatrix)):
        if text is not None and not as_gguf:
            raise UsageError(f"{name} {text}: is only for a GGUF: name the target NAME.gguf")
    with refusing("", target):
        check_target(target, as_gguf, options.type, options.force)
    if options.base is None:
        source = open_source(options.source, as_gguf, options.merge)
        write = partial(huggingface.write_folder, source, options.type, shard)
    else:
        source, base = adapter_and_base(options, as_gguf)
        write = partial(huggingface.write_peft, source, base, options.type)
    if not as_gguf:
        return Export(target, options.type, write=write)
    encoder, keys = encoder_of(source, options), gguf_metadata(source, options.type, options.imatrix)
    for text in cautions(keys, source.path) if warns else ():
        huggingface.warn(text)
    most = None if options.split_size is None else size_of("--split-size", options.split_size)
    kinds = {name: kind.name.lower() for name, kind in encoder.kinds.items()}
    export = Export(target, options.type, kinds, plan_files(encoder, keys, target, most), encoder)
    conflict = next((path for path in export.results if os.path.lexists(path) and path != target), None)
    if conflict is not None and not options.force:
        raise UsageError(f"{conflict}: already exists: use another name, or --force to replace it")
    return export


def size_of(flag: str, text: str) -> int:
    """Return the number of bytes in a size such as 5GB. Raise UsageError, naming the flag, for other text."""
    match = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in UNITS or int(match[1]) < 1:
        raise UsageError(f"{flag} {text}: expected a size such as 5GB or 200MiB")
    return int(match[1]) * UNITS[match[2].upper()]


def check_target(target: Path, as_gguf: bool, kind: str, force: bool) -> None:
    """Raise UsageError unless the target may be written. --force replaces only a file or a model folder."""
    parent = target.absolute().parent
    if not is_folder(parent):
        raise UsageError(f"{target}: the folder {parent} does not exist: create it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{shown(target)}: cannot be written: Permission denied: {shown(parent)}")
    if not as_gguf and (kind not in huggingface.DTYPES or target.suffix in (".safetensors", ".gguf")):
        subject = f"--type {kind}" if kind not in huggingface.DTYPES else str(target)
        raise UsageError(f"{subject}: safetensors is a folder of f32, f16 or bf16: use another name or type")
    if is_folder(target) and not target.is_symlink():
        files = (CONFIG, *huggingface.COPIED_FILES, PEFT_CONFIG, PEFT_MODEL)
        names = [name for name in sorted(os.listdir(target)) if name not in files]
        foreign = next((name for name in names if not WEIGHTS.fullmatch(name)), None)
        if as_gguf or foreign:
            content = f"a folder with {show(foreign)}" if foreign else "a folder"
            raise UsageError(f"{target}: expected a new name or a model, found {content}: use another name")
        if os.path.samefile(target, os.curdir):
            raise UsageError(f"{target}: would replace the current folder: change to another one first")
        if not os.listdir(target):
            return
    if os.path.lexists(target) and not force:
        raise UsageError(f"{target}: already exists: use another name, or --force to replace it")
    if os.path.lexists(target) and not is_folder(target) and not (as_gguf and is_file(target)):
        raise UsageError(f"{target}: not a model, so --force does not replace it: use another name")


def adapter_and_base(options: Namespace, as_gguf: bool) -> tuple[weights.WeightSource, weights.WeightSource]:
    """Return the adapter to export alone, and its base. Raise UsageError if a flag does not fit it."""
    kind = options.type if as_gguf and options.type != "f32" else None
    for name, text in (("--merge", options.merge), ("--type", kind), ("--imatrix", options.imatrix)):
        if text is not None:
            raise UsageError(f"{name} {text}: cannot be used with --base, which converts only the adapter")
    base = weights.open_weights(options.base)
    adapter = weights.adapter_source(options.source, base.metadata)
    weights.MergedWeights(base, adapter)  # raises an error if the adapter belongs to another base
    if weights.TOKENS_ADDED in adapter.metadata:
        raise UsageError(
            f"{adapter.path}: has rows of added tokens, which an adapter alone cannot hold: export the full "
            f"model, with {shown(options.base)} as the source and --merge {shown(options.source)}"
        )
    return adapter, base


def open_source(path: str, as_gguf: bool, adapter: str | None) -> weights.WeightSource:
    """Return the source. Raise UsageError unless it is a model that the target's format can store."""
    source = weights.open_merged(path, adapter)
    architecture = weights.keys_of(source).architecture
    if architecture is None or architecture == "zero_mpi":
        kind = "none" if architecture is None else "a training state: use its model.gguf"
        raise UsageError(f"{source.path}: expected a model with its architecture, found {kind}")
    if weights.is_adapter_file(source):
        raise UsageError(f"{source.path}: is an adapter: add --base with the model that it was trained on")
    if not as_gguf or weights.folder_of(source) is not None:
        shapes = {name: spec.shape for name, spec in source.tensors.items()}
        config_from_gguf(source.metadata, shapes, path, source.read).check_tensors(shapes, path)
    return source


def encoder_of(source: weights.WeightSource, options: Namespace) -> Encoder:
    """Return the encoder. Raise UsageError if the type needs a missing library or importance matrix."""
    file_type, matrix = options.type, options.imatrix
    by_ggml = file_type in mixes.MIXES or matrix is not None
    if by_ggml:
        ggml.library(f"--type {file_type}" if file_type in mixes.MIXES else f"--imatrix {matrix}")
    shapes = {name: spec.shape for name, spec in source.tensors.items()}
    trained_for = weights.keys_of(source).text(mixes.QAT) == file_type and matrix is None
    kinds = mixes.types_of(source.metadata, shapes, file_type, options.pure, matrix is not None, trained_for)
    importance = {} if matrix is None else read_importance(matrix, shapes)
    for name, kind in kinds.items():
        if name not in importance and mixes.needs_weights(name, kind, file_type):
            hint = "give --imatrix FILE from evaluate --imatrix" if matrix is None else f"{matrix} has none"
            raise UsageError(f"--type {file_type}: {kind.name} of {name} needs an importance matrix: {hint}")
    masters, path = None, source.path.with_name(OPTIMIZER)
    if trained_for and isinstance(source, GGUFFile) and is_file(path):
        state = GGUFFile.open(path)
        ids = {weights.keys_of(file).text(CHECKPOINT_ID) for file in (state, source)}
        masters = state if len(ids) == 1 else None
    return Encoder(source, kinds, by_ggml, importance, masters)


def gguf_metadata(source: weights.WeightSource, file_type: str, matrix: str | None) -> dict[str, Any]:
    """Return the keys of the source that stay valid, and the tokenizer's keys if the source is a folder."""
    keys = {name: value for name, value in source.metadata.items() if name not in OUTDATED_KEYS}
    keys["general.file_type"] = np.uint32(mixes.file_type(file_type))
    if file_type in mixes.MIXES or file_type.startswith("q"):
        keys["general.quantization_version"] = np.uint32(2)
    if matrix is not None:
        keys["quantize.imatrix.file"] = matrix
    if weights.folder_of(source) is not None:
        path, none = source.path / huggingface.TOKENIZER, {"tokenizer.ggml.model": "none"}
        size = source.tensors["token_embd.weight"].shape[0]
        keys |= tokenizer_from_json(path, size).metadata() if path.exists() else none
    return keys | huggingface.ends_of(keys, str(source.path))[1]


def cautions(keys: Metadata, path: Path) -> Iterator[str]:
    """Yield warnings about the tokenizer in the keys of a GGUF; `path`: the source."""
    if rules := rules_in_words(keys):
        yield f"llama.cpp does not follow the tokenizer's {rules}: it may tokenize some text differently"
    file = next((path / name for name in ("vocab.json", "tokenizer.model") if is_file(path / name)), None)
    if file is not None and GGUFKeys(keys).tokenizer is None:
        ways = "make a tokenizer.json with transformers, or convert the folder with llama.cpp"
        yield f"{file}: only a tokenizer.json is read, so the GGUF has no tokenizer: {ways}"


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def summary(export: Export) -> str:
    """Return a line on the result: name, type, size, tensors by type, and matrices that got another type."""
    target, file_type, kinds = export.results[0], export.file_type, export.kinds
    files = [target, *target.iterdir()] if target.is_dir() else export.results
    size = sum(file.stat().st_size for file in files if file.is_file())
    count = Counter(kinds.values())
    counts = ", ".join(f"{number} {kind}" for kind, number in count.most_common())
    parts = f"{len(files)} files, " if len(export.files) > 1 else ""
    text = f"{target}: {file_type}, {parts}{size / 1e6:.1f} MB, {len(kinds)} tensors ({counts})"
    if file_type not in mixes.MIXES:
        finer = [name for name, kind in kinds.items() if kind == "q8_0" != file_type]
        text += f"; q8_0: {', '.join(finer)} (--pure: {file_type})" if finer else ""
    fallbacks = 0 if file_type in ("f32", "f16", "bf16") else count["f16"]
    return text + (f"; f16 where the row length is not a multiple of 32: {fallbacks}" if fallbacks else "")


def main() -> None:
    run("export", command, alone=not environment.under_launcher())
