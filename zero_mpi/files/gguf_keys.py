"""Reader of the keys of a GGUF file that checks their types, because any program may have written the file.

The value of an absent key is None. A value of another type or outside its range is an error of one line that
names the file, the key, what was expected and what was found. Code that acts on a key's value reads it here;
code that only displays or copies keys (`inspect`, `compare`, `export`) may use them unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.errors import FileError
from zero_mpi.files.foreign import quoted, shown

MAX_INTEGER = (1 << 63) - 1  # only a UINT64 can be larger
MOST_SIZE = (1 << 31) - 1  # largest size in a model: the file has UINT32, but llama.cpp uses INT32
ARCHITECTURE, TOKENIZER = "general.architecture", "tokenizer.ggml.model"
TEMPLATE = "tokenizer.chat_template"
TOKENS, MERGES, TYPES = (f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "token_type"))
THE_FILE = "the model file"


class GGUFKeys:
    """Type-checking reader of a file's keys. `place` names the file, unless callers add its name."""

    def __init__(self, metadata: Mapping[str, Any], place: str = "") -> None:
        self.metadata, self.place = metadata, place

    def fault(self, key: str, expected: str) -> FileError:
        actual = description_of(self.metadata.get(key))
        prefix = f"{self.place}: " if self.place else ""
        return FileError(f"{prefix}the GGUF key {shown(key)}: expected {expected}, found {actual}")

    def value(self, key: str, expected: str, fits: Callable[[Any], bool]) -> Any:
        """Return the value of a key, None if it is absent; raise FileError if `fits` rejects it."""
        value = self.metadata.get(key)
        if value is not None and not fits(value):
            raise self.fault(key, expected)
        return value

    def text(self, key: str) -> str | None:
        result: str | None = self.value(key, "a text", lambda value: isinstance(value, str))
        return result

    def flag(self, key: str) -> bool | None:
        result: bool | None = self.value(key, "true or false", lambda value: isinstance(value, bool))
        return result

    def integer(self, key: str, least: int = 0, most: int = MAX_INTEGER, expected: str = "") -> int | None:
        limits = f"of at least {least}" if most in (MAX_INTEGER, MOST_SIZE) else f"from {least} to {most}"
        description = expected or f"a whole number {limits}"
        value = self.value(key, description, lambda value: is_whole(value) and least <= value <= most)
        return None if value is None else int(value)

    def number(self, key: str, least: float = -math.inf) -> float | None:

        def fits(value: Any) -> bool:
            is_number = is_whole(value) or isinstance(value, float | np.floating)
            return is_number and math.isfinite(value) and bool(value >= least)

        limit = f" of at least {least:g}" if least > -math.inf else ""
        value = self.value(key, f"a finite number{limit}", fits)
        return None if value is None else float(value)

    def texts(self, key: str) -> list[str] | None:
        """Return the array of strings of a key; an empty array may have any type."""

        def fits(value: Any) -> bool:
            flat = value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else value
            return isinstance(flat, list | tuple) and all(
                issubclass(kind, str) for kind in {*map(type, flat)}
            )

        value = self.value(key, "an array of texts", fits)
        return None if value is None else list(value)

    def integers(self, key: str, count: int) -> list[int] | None:
        value = self.value(key, f"an array of {count} whole numbers", lambda v: is_row(v, "iu", count))
        return None if value is None else value.tolist()

    def numbers(self, key: str, count: int) -> NDArray[np.float32] | None:

        def fits(value: Any) -> bool:
            return is_row(value, "f", count) and value.dtype == np.float32 and bool(np.isfinite(value).all())

        value = self.value(key, f"an array of {count} finite float32 numbers", fits)
        return None if value is None else np.asarray(value, np.float32)

    def octets(self, key: str) -> bytes | None:
        value = self.value(key, "an array of bytes", lambda v: is_row(v, "iu") and v.dtype.itemsize == 1)
        return None if value is None else np.asarray(value).tobytes()

    # Keys that several parts of the package read.

    @property
    def architecture(self) -> str | None:
        return self.text(ARCHITECTURE)

    @property
    def tokenizer(self) -> str | None:
        kind = self.text(TOKENIZER)
        return None if kind == "none" else kind

    def token_id(self, name: str, vocabulary: int) -> int | None:
        """Return `tokenizer.ggml.NAME_token_id`. Raise FileError if it is not below `vocabulary`."""
        key = f"tokenizer.ggml.{name}_token_id"
        return self.integer(key, 0, vocabulary - 1, f"an id below {vocabulary}")


def is_row(value: Any, kinds: str, count: int | None = None) -> bool:
    """Return whether a value is a 1-D array of `count` numbers (None: any) with a dtype of `kinds`."""
    is_array = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in kinds
    return is_array and count in (None, len(value))


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer; true and false are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def description_of(value: Any) -> str:
    """Return a short description of a key's value, for an error."""
    if value is None:
        return "nothing"
    if isinstance(value, list | tuple | np.ndarray):
        kinds = str(value.dtype) if isinstance(value, np.ndarray) else "texts"
        return f"an array of {len(value)} {kinds}"
    return quoted(value.item() if isinstance(value, np.generic) else value)
