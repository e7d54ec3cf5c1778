"""File of a teacher's predictions: each token's most likely ids, and the remaining probability.

The first `HEAD` bytes are JSON that identifies the data. Then one record follows for each token, in the order
of the data: ids, their log-probabilities in descending order, and the logarithm of the remaining probability.
A record of zeros means that the teacher did not predict this token.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.documents import FileSpan
from zero_mpi.errors import FileError, JobError, prefixed
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.files.open import open_file
from zero_mpi.files.parse import parse_json

HEAD, FORMAT, MOST = 4096, "zero_mpi top-k 1", 1 << 40
Records = NDArray[Any]


@dataclass(frozen=True)
class TeacherFile:
    """Predictions of a teacher: the `k` most likely ids for each of `tokens` tokens, at one temperature.

    data, tokenizer   digests of the data and the tokenizer
    sha256            digest of the records; of the model and its settings while the file is unfinished
    """

    k: int
    temperature: float
    tokens: int
    vocab: int
    data: str
    tokenizer: str
    sha256: str = ""

    @property
    def record(self) -> np.dtype[Any]:
        return np.dtype([("ids", "<u4", (self.k,)), ("logp", "<f4", (self.k,)), ("rest", "<f4")])

    @property
    def nbytes(self) -> int:
        return HEAD + self.tokens * self.record.itemsize

    def header(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}).encode().ljust(HEAD)

    def read(self, path: str, places: NDArray[np.int64]) -> Records:
        """Return the records (n,) of tokens `places` (n,); zeros for -1. Raise JobError if one is invalid."""
        records, size = np.zeros(places.size, self.record), self.record.itemsize
        span = FileSpan(path, HEAD, self.nbytes - HEAD, np.dtype(np.uint8), self.nbytes)
        cuts = np.flatnonzero((np.diff(places) != 1) | (places[:-1] < 0)) + 1
        for first, stop in zip([0, *cuts], [*cuts, places.size], strict=True):
            if first < stop and places[first] >= 0:
                span.read(int(places[first]) * size, records[first:stop].view(np.uint8))
        is_sound = (records["ids"] < self.vocab).all() and (records["logp"] <= 0).all()
        if not is_sound or not np.isfinite(records["logp"]).all() or not (records["rest"] <= 0).all():
            raise JobError(f"--teacher {shown(path)}: expected log-probabilities of ids below {self.vocab}")
        return records


def open_teacher(path: str) -> TeacherFile:
    """Return the header of a file. Raise FileError if the header is invalid or the file has another size."""
    with prefixed("--teacher"), open_file(path, "a file of evaluate --top-k-out") as file:
        head, nbytes = file.read(HEAD), os.fstat(file.fileno()).st_size
    try:
        table = parse_json(head.rstrip())
        kinds = {"k": int, "temperature": float, "tokens": int, "vocab": int}
        kinds |= dict.fromkeys(("format", "data", "tokenizer", "sha256"), str)
        is_valid = isinstance(table, dict) and table.keys() == kinds.keys() and table.pop("format") == FORMAT
        if not is_valid or any(type(table[name]) is not kinds[name] for name in table):
            raise ValueError("expected a header of evaluate --top-k-out")
        teacher = TeacherFile(**table)
        if not (0 < teacher.k <= teacher.vocab <= 1 << 32 and 0 <= teacher.tokens <= MOST):
            raise ValueError(f"expected 1 to {teacher.vocab} ids for each token, found {teacher.k}")
        if not (0 < teacher.temperature < math.inf and nbytes == teacher.nbytes):
            raise ValueError(f"expected {teacher.nbytes:,} bytes, found {nbytes:,}")
    except ValueError as error:
        raise FileError(f"--teacher {shown(path)}: {error or quoted(head[:40])}") from None
    return teacher


def begin(path: Path, teacher: TeacherFile) -> None:
    """Create the file with its header. Keep an earlier job's unfinished file if it has the same header."""
    size = path.stat().st_size if path.exists() else -1
    with path.open("r+b" if size >= 0 else "x+b") as file:
        if size != teacher.nbytes or file.read(HEAD) != teacher.header():
            file.truncate(0)
            file.truncate(teacher.nbytes)
            os.pwrite(file.fileno(), teacher.header(), 0)
