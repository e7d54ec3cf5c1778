"""`zero-mpi inspect PATH [OTHER]`: describes and checks a model or checkpoint, or compares two.

The result is one dictionary (`examine`, `compare`): `--json` prints it, and the text here is
made of nothing else. Exit status 0: sound, or the same; 1: damaged or different; 2: not readable.
"""

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import MARGIN, WIDTH, plural, size, write
from zero_mpi.commands.inspect.examine import Report, examine
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import LONGEST, one_line, printable, shown
from zero_mpi.launch.world import World, run

FEW = 8  # entries of a list that are shown by default
MANY = 200  # keys that are shown by default
DIGEST = 16  # letters of a digest that are shown among other values


def make_parser() -> Parser:
    """Make the parser of the command line."""
    parser = Parser(
        prog="zero-mpi inspect",
        description="Show and check a model or checkpoint. With OTHER, compare the two bit by bit. Exit "
        "status 0: valid, or equal; 1: damaged, or different; 2: cannot be read.",
        epilog="Examples:\n\n"
        "  zero-mpi inspect runs/default/latest\n"
        "  zero-mpi inspect runs/a/latest runs/b/latest\n"
        "  zero-mpi inspect runs/a runs/b",
    )
    add = parser.add_argument
    add(
        "path",
        help="GGUF file (the first of a split file), checkpoint or Hugging Face folder; with OTHER also a "
        "run folder",
    )
    add("other", nargs="?", help="path of the same kind, to compare with")
    add("--keys", action="store_true", help="show all keys, with full arrays and texts")
    add("--tensors", action="store_true", help="show all tensors, or all that differ")
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Print the report. Return the exit status."""
    options = make_parser().parse_args(arguments)
    path = Path(options.path)
    try:
        if options.other is None:
            found = examine(path, keys=options.keys, tensors=options.tensors)
            lines, sound = report_lines(found, options.keys), found["sound"]
        else:
            from zero_mpi.commands.inspect.compare import compare_paths  # it imports what `verify` needs

            found = compare_paths(path, Path(options.other))
            lines, sound = comparison_lines(found, options.tensors), found["same"]
    except OSError as error:  # the folder may not be readable
        raise UsageError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from None
    if options.json:
        write(json.dumps(found, indent=2, allow_nan=False).replace("\x7f", "\\u007f").split("\n"))
    else:
        write(lines)
    return 0 if sound else 1


def section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield lines with a title in the margin of the first."""
    for line in lines:
        yield f"{title:{MARGIN}}{line}"
        title = ""


def some(lines: Sequence[str], everything: bool = False) -> list[str]:
    """Return the first few lines, and how many more there are."""
    more = len(lines) - FEW
    return [*lines] if everything or more <= 0 else [*lines[:FEW], f"and {more:,} more"]


def text_of(value: Any, most: int = LONGEST) -> str:
    """Return a value for messages, in at most `most` letters."""
    if value is None:
        return "none"
    if isinstance(value, dict) and value.keys() == {"array", "length", "first"}:
        items = ", ".join(map(repr, value["first"]))
        return shown(f"{value['length']:,} {value['array']}: {items}, ...", most)
    if isinstance(value, int) and not isinstance(value, bool):
        return shown(f"{value:,}", most)
    return shown(value if isinstance(value, str) and value.isalnum() else repr(value), most)


# ---------------------------------------------------------------------------------------------- a report


def report_lines(found: Report, all_keys: bool) -> Iterator[str]:
    """Yield the text of one path."""
    yield from section("path", [printable(found["path"])])
    files = []
    for file in found["files"]:
        name, parts = shown(Path(file["path"]).name), f" in {file['parts']} parts" * (file["parts"] > 1)
        counts = f"{file['tensors']:,} tensors of {file['elements']:,} elements"
        files.append(f"{name}: {file['format']}{parts}, {size(file['bytes'], 'bytes')}, {counts}")
    yield from section("files", files)
    if "model" in found:
        model = found["model"]
        lines = wrapped(shown(str(model["architecture"])), model["sizes"])
        if model["cannot_run"] is not None:
            lines.append(f"zero_mpi cannot run it: {one_line(model['cannot_run'])}")
        yield from section("model", lines)
        yield from section("tokenizer", [tokenizer_line(found["tokenizer"])])
    types = (
        f"{kind['type']}: {plural(kind['tensors'], 'tensor')}, {size(kind['bytes'], 'bytes')}"
        for kind in found["types"]
    )
    yield from section("types", types)
    yield from section("keys", key_lines(found["keys"], all_keys))
    if (training := found["training"]) is not None:
        made = [f"{name} {value:,}" for name, value in training.items() if isinstance(value, int)]
        lines = [
            ", ".join(made),
            f"id {text_of(training['id'])}, state {text_of(training['recorded_state_digest'])}",
        ]
        for title in ("settings", "plan", "machine"):
            values = training.get(title, {})
            lines += wrapped(title, {name: values[name] for name in values if not name.startswith("model.")})
        yield from section("training", lines)
    for rows in found.get("tensors", {}).values():
        yield from section("tensors", table(rows))
    yield from section("sound" if found["sound"] else "NOT SOUND", verdict_lines(found))


def key_lines(keys: Mapping[str, Mapping[str, Any]], everything: bool) -> Iterator[str]:
    """Yield a line per key; of very many only the first, unless all are wanted."""
    pairs = [(role, key) for role, own in keys.items() for key in own]
    for role, key in pairs if everything else pairs[:MANY]:
        line = f"{shown(key)} = {text_of(keys[role][key], sys.maxsize)}"
        yield f"{role}: {line}" if len(keys) > 1 else line
    if not everything and len(pairs) > MANY:
        yield f"and {len(pairs) - MANY:,} more (show all with --keys)"


def wrapped(title: str, values: Mapping[str, Any]) -> list[str]:
    """Return names and values in as many lines as they need, digests cut."""
    texts = []
    for name, value in values.items():
        if isinstance(value, str) and len(value) > 2 * DIGEST:
            value = f"{value[:DIGEST]}..."
        texts.append(f"{shown(name)} {text_of(value)}")
    text = f"{title}: {', '.join(texts)}"
    return textwrap.wrap(text, WIDTH - MARGIN, subsequent_indent="  ", break_on_hyphens=False)


def tokenizer_line(tokenizer: Mapping[str, Any] | None) -> str:
    """Return the tokenizer in a line."""
    if tokenizer is None:
        return "none in this file"
    named = {"tokens": "tokens", "merges": "merges", "bos_token_id": "bos", "eos_token_id": "eos"}
    kind = "bytes" if tokenizer["bytes"] else text_of(tokenizer["model"])
    pre = f" (pre {text_of(tokenizer['pre'])})" if "pre" in tokenizer else ""
    rest = [f"{name} {text_of(tokenizer[key])}" for key, name in named.items() if key in tokenizer]
    return ", ".join([kind + pre, *rest])


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield every tensor: name, shape, type, bytes, beginning of its digest, values that are not finite."""
    columns = [
        (
            shown(row["name"]),
            "x".join(map(str, row["shape"])),
            row["type"],
            f"{row['bytes']:,}",
            row["digest"][:DIGEST],
            f"{row['not_finite']:,} not finite" if row["not_finite"] else "",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
    for row in columns:
        texts = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        texts[3] = row[3].rjust(widths[3])
        yield "  ".join(texts).rstrip()


def verdict_lines(found: Report) -> Iterator[str]:
    """Yield checksums, values, and faults."""
    count, odd, unknown = found["checksums"], found["not_finite"], ", ".join(found["unknown_types"])
    yield from map(one_line, found["problems"])
    if not count:
        yield "checksums: none in the file (only checkpoints of a run have them)"
    elif not found["problems"]:
        yield f"checksums: all {count:,} tensors match"
    yield f"{'state' if len(found['files']) > 1 else 'tensors'} computed: {found['state_digest']}"
    yield from some(
        [f"tensor {shown(name)}: {number:,} values are not finite" for name, number in odd.items()]
    )
    if not odd:
        yield f"values: all finite{f', but {unknown} were not checked' if unknown else ''}"


# ------------------------------------------------------------------------------------------- a comparison


def comparison_lines(found: Report, everything: bool) -> Iterator[str]:
    """Yield the text of two paths."""
    yield from section("first", [printable(found["paths"][0])])
    yield from section("second", [printable(found["paths"][1])])
    counts = f"{found['tensors']:,} in both, {len(found['differing']):,} differ"
    yield from section("tensors", [counts, *difference_lines(found["difference"])])
    names = {"differing": "differ", "only_in_first": "only first", "only_in_second": "only second"}
    for key, title in names.items():
        yield from section(title, some([shown(name) for name in found[key]], everything))
    keys = [
        f"{key['file']} {shown(key['key'])}: {' and '.join(map(text_of, key['values']))}"
        for key in found["keys"]
    ]
    yield from section("keys", some(keys, everything))
    if "records" in found:
        records = found["records"]
        line = f"all {plural(records['common'], 'common record')} are identical"
        if records["step"] is not None:
            values = " and ".join(map(text_of, records["values"]))
            line = f"first difference at step {records['step']}: {shown(records['field'])} {values}"
        yield from section("records", [line])
        yield from section("checkpoints", checkpoint_lines(found["checkpoint"]))
    yield from section("verdict", ["identical, bit for bit" if found["same"] else "different"])


def difference_lines(first: Report | None) -> Iterator[str]:
    """Yield lines on how the first differing tensor differs."""
    if first is None:
        return
    stored = [f"{one['type']} {one['shape']}" for one in first["stored"]]
    if "element" not in first:
        yield f"the first, {shown(first['name'])}: {stored[0]} and {stored[1]}"
        return
    values = "" if first["values"] is None else f": {' and '.join(map(text_of, first['values']))}"
    kind = "elements" if "elements" in first else "blocks"
    yield f"the first, {shown(first['name'])}, {stored[0]}: {first[kind]:,} {kind} differ"
    yield f"first at element {first['element']}{values}; the largest difference: {text_of(first['largest'])}"


def checkpoint_lines(found: Report) -> Iterator[str]:
    """Yield lines about the first checkpoint whose tensors differ."""
    if found["step"] is None:
        yield f"{plural(found['common'], 'common checkpoint')}: identical tensors"
    elif "problem" in found:
        yield f"the checkpoint of step {found['step']} cannot be read: {one_line(found['problem'])}"
    else:
        count = f"{len(found['differing'])} of {found['tensors']} tensors differ"
        yield f"first difference at step {found['step']}: {count}"
        if (first := found["difference"]) is not None:
            values = first.get("values")
            pair = f": {' and '.join(map(text_of, values))}" if values else ""
            yield f"first in {shown(first['name'])}, element {first.get('element', 'of another shape')}{pair}"


main = partial(run, "inspect", command, alone=True)
