"""Names of tensors in GGUF files and in Hugging Face folders, and the order of their elements.

GGUF stores llama's q and k in interleaved rotary order, and all matrices as (out, in). Hugging Face stores
the two halves of a head one after the other, and gpt2's matrices as (in, out). No error shows that a
conversion was forgotten: shapes may match, and then the model generates nonsense.
"""

import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from zero_mpi.checkpoint.huggingface.families import FAMILIES, JOINT, JOINT_GRANITE, MIXTURES, Order
from zero_mpi.checkpoint.tensor_file import CHUNK, Floats
from zero_mpi.errors import FileError
from zero_mpi.files.foreign import show

Read = Callable[[int, int], Floats]
"""Function that returns elements [start, stop) of a flattened tensor in the folder."""


def rows_of(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield elements [start, stop) of a matrix of `width` columns in parts, as (first row, end row, first
    column, end column). There are at most three parts: the end of a row, full rows, the start of a row."""
    while start < stop:
        row, column = divmod(start, width)
        rows = (stop - start) // width if column == 0 else 0
        if rows:
            yield row, row + rows, 0, width
        else:
            yield row, row + 1, column, min(width, column + stop - start)
        start += rows * width or min(width - column, stop - start)


def fill_interleaved(read: Read, head: int, width: int, start: int, out: Floats) -> None:
    """Fill `out` with the elements of a tensor in GGUF's rotary order, from element `start` on.

    `read` returns elements in the order of halves; a head has `head` rows with `width` elements.
    """
    at = 0
    for a, b, c, d in rows_of(start, start + out.size, width):
        block = out[at : at + (b - a) * (d - c)].reshape(b - a, d - c)
        for first in range(a - a % head, b, head):
            for half in (0, 1):  # the folder has GGUF's even rows of a head first, then the odd rows
                rows = [row for row in range(first + half, first + head, 2) if a <= row < b]
                if rows:
                    source = first + half * (head // 2) + (rows[0] - first) // 2
                    _read_rows(read, source * width + c, block[rows[0] - a : rows[-1] - a + 1 : 2], width)
        at += block.size


def _read_rows(read: Read, start: int, target: Floats, width: int) -> None:
    step = max(1, CHUNK // width)
    for at in range(0, len(target), step):
        part = target[at : at + step]
        part[:] = read(start + at * width, start + at * width + part.size).reshape(part.shape)


def fill_transposed(read: Read, height: int, width: int, start: int, out: Floats) -> None:
    """Fill `out` with elements, from `start` on, of the transpose of a matrix stored as (width, height).

    The stored matrix is read in narrow bands of full rows, which are contiguous.
    """
    at, step = 0, max(1, CHUNK // 16 // height)
    for a, b, c, d in rows_of(start, start + out.size, width):
        block = out[at : at + (b - a) * (d - c)].reshape(b - a, d - c)
        for i in range(c, d, step):
            band = read(i * height, min(d, i + step) * height).reshape(-1, height)
            block[:, i - c : i - c + len(band)] = band[:, a:b].T
        at += block.size


def halves_of(read: Read, head: int, width: int, heads: int) -> Iterator[Floats]:
    """Yield the heads of a tensor, flattened, with rows in the order of halves instead of rotary order."""
    for number in range(heads):
        rows = read(number * head * width, (number + 1) * head * width).reshape(head // 2, 2, width)
        yield np.ascontiguousarray(rows.swapaxes(0, 1)).reshape(-1)


def transposes_of(read: Read, height: int, width: int) -> Iterator[Floats]:
    """Yield the transpose of a (height, width) matrix in bands of its rows, flattened."""
    step, rows = max(1, CHUNK // height), max(1, CHUNK // width)
    for c in range(0, width, step):
        band = np.empty((min(step, width - c), height), np.float32)
        for a in range(0, height, rows):
            b = min(height, a + rows)
            band[:, a:b] = read(a * width, b * width).reshape(b - a, width)[:, c : c + step].T
        yield band.reshape(-1)


def parts_of(arch: str, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """Yield the experts' matrices in a tensor of a folder; none if it is not a tensor of experts.

    Each item has the GGUF name, the number of the expert, the index of the first element, and the shape.
    """
    block = re.fullmatch(r"model\.layers\.(0|[1-9][0-9]{,5})\.(.+?)(\.weight)?", name)
    if block is None or arch not in MIXTURES:
        return
    module, single, joint = MIXTURES[arch]
    match = re.fullmatch(rf"{module}\.experts\.(0|[1-9][0-9]{{,5}})\.(\w+)", block[2])
    if match and match[2] in single and len(shape) == 2:
        yield f"blk.{block[1]}.{single[match[2]]}.weight", int(match[1]), 0, shape
    elif block[2] in joint and len(shape) == 2 + ("shared" not in block[2]):
        stems = joint[block[2]]
        rows, width = shape[-2] // len(stems), shape[-1]
        for place in range(len(stems) * math.prod(shape[:-2])):
            expert, part = divmod(place, len(stems))
            yield f"blk.{block[1]}.{stems[part]}.weight", expert, place * rows * width, (rows, width)


def parts_from(
    arch: str, name: str, shape: tuple[int, ...]
) -> list[tuple[str, tuple[int, ...], list[str]]] | None:
    """Return (name, shape, GGUF names inside) of the folder's tensors that hold a GGUF tensor of experts.

    A tensor that joins several GGUF tensors is returned only for the first. Return None for other tensors.
    """
    prefix, _, stem = name.removesuffix(".weight").rpartition(".")
    layer, (module, single, joint) = prefix.replace("blk.", "model.layers."), MIXTURES[arch]
    for hf, gguf in joint.items():
        if not single and stem in gguf:
            joined = (*shape[:-2], shape[-2] * len(gguf), shape[-1])
            entry = (f"{layer}.{hf}.weight", joined, [f"{prefix}.{part}.weight" for part in gguf])
            return [entry] if stem == gguf[0] else []
    last = next((hf for hf, gguf in single.items() if gguf == stem), None)
    if last is None:
        return None
    return [(f"{layer}.{module}.experts.{e}.{last}.weight", shape[1:], [name]) for e in range(shape[0])]


def to_gguf(arch: str, name: str) -> str | None:
    """Return a folder tensor's GGUF name; None if it has no weights. Raise FileError for an unknown name."""
    family = FAMILIES[arch]
    if re.fullmatch(family.dropped, name):
        return None
    stem, _, kind = name.removeprefix(family.prefix).rpartition(".")
    block = re.fullmatch(rf"{family.blocks}\.(0|[1-9][0-9]{{,5}})\.(.+)", stem)
    gguf = family.inner.get(block[2]) if block else family.outer.get(stem)
    if gguf is None or kind not in ("weight", "bias"):
        raise FileError(f"tensor {show(name)} is not one of the tensors of a {arch} model")
    return f"blk.{block[1]}.{gguf}.{kind}" if block else f"{gguf}.{kind}"


def from_gguf(arch: str, name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor. Raise FileError for an unknown name."""
    family = FAMILIES[arch]
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blk\.([0-9]+)\.(.+)", stem)
    table = family.inner if block else family.outer
    hf = next((hf for hf, gguf in table.items() if gguf == (block[2] if block else stem)), None)
    if hf is None:
        raise FileError(f"tensor {show(name)} has no counterpart in a Hugging Face {arch} model")
    if block:
        return f"{family.prefix}{family.blocks}.{block[1]}.{hf}.{kind}"
    return f"{hf}.{kind}" if hf == "lm_head" else f"{family.prefix}{hf}.{kind}"


def order_of(arch: str, name: str) -> Order:
    """Return the order that the elements of the GGUF tensor `name` have in a folder."""
    stem, _, kind = name.rpartition(".")
    order = FAMILIES[arch].orders.get(stem.rpartition(".")[2], Order.SAME)
    return Order.SAME if order == Order.TRANSPOSED and kind == "bias" else order


def place_of(arch: str, name: str) -> tuple[int, int, int]:
    """Return a key that sorts GGUF names in the order of use: embedding, blocks by number, other tensors."""
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blk\.([0-9]+)\.(.+)", stem)
    if block:
        stacks = (name for joint in (JOINT, JOINT_GRANITE) for names in joint.values() for name in names)
        inner = [*FAMILIES[arch].inner.values(), *stacks]
        return 1 + int(block[1]), inner.index(block[2]), int(kind == "bias")
    outer = list(FAMILIES[arch].outer.values()).index(stem)
    return 0 if stem.endswith("embd") else 1 << 62, outer, int(kind == "bias")
