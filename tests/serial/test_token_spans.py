"""Ids are mapped from their files: ranks of a host share the pages, and an error names a missing file."""

import os
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import run_job
from test_command_bits import SIZES, needs_mpiexec

from zero_mpi.data.documents import FileSpan, TokenSpans, read_ids
from zero_mpi.errors import JobError

VOCABULARY = 70_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ids")


def in_files(folder, *parts):
    """Write each part to a file, every second one as uint32; return the spans."""
    spans = []
    for number, part in enumerate(parts):
        ids = np.array(part, np.uint32 if number % 2 else np.uint16)
        path = folder / f"{number}.bin"
        path.write_bytes(b"head" + ids.tobytes())
        spans.append(FileSpan(str(path), 4, ids.size, ids.dtype, path.stat().st_size))
    return TokenSpans(spans, VOCABULARY)


def all_of(spans):
    return spans.read_all().tolist()


@given(st.data())
def test_reads_and_slices_are_those_of_an_array(folder, data):
    parts = data.draw(st.lists(st.lists(st.integers(0, 60_000), max_size=9), max_size=4))
    array, spans = np.array([i for part in parts for i in part], np.uint32), in_files(folder, *parts)
    assert (spans.size, all_of(spans)) == (array.size, array.tolist())
    first, stop = data.draw(st.integers(0, array.size)), data.draw(st.integers(0, array.size))
    part, array = spans[first:stop], array[first:stop]
    assert all_of(part) == array.tolist()
    starts = np.array(data.draw(st.lists(st.integers(0, array.size), max_size=4)), np.int64)
    sizes = np.array([data.draw(st.integers(0, array.size - start)) for start in starts.tolist()], np.int64)
    assert (
        pickle.loads(pickle.dumps(part)).read(starts, sizes).tolist()
        == read_ids(array, starts, sizes).tolist()
    )


def test_a_file_that_shrinks_goes_or_lies_is_named(folder):
    spans = in_files(folder, range(100))
    path = spans.spans[0].path
    all_of(spans)
    os.truncate(path, 50)
    with pytest.raises(JobError, match=r"200 bytes at byte 4 of .*0.bin: it ends at byte 50; .*--data"):
        all_of(spans)
    other = TokenSpans([FileSpan(str(folder / "gone"), 0, 5, np.dtype("<u2"), 10)], VOCABULARY)
    with pytest.raises(JobError, match=r"gone: no such file; .*--data"):
        all_of(other)
    (folder / "long").write_bytes(bytes(12))
    with pytest.raises(JobError, match=r"long has 12 bytes, .*10 .*--data"):
        all_of(TokenSpans([FileSpan(str(folder / "long"), 0, 5, np.dtype("<u2"), 10)], VOCABULARY))
    with pytest.raises(JobError, match=r"1.bin: id 80000 at byte 8 is outside the vocabulary of 70000"):
        all_of(in_files(folder, [1], [5, 80_000]))


def sparse(path, gigabytes):
    """Write a sparse token file of zeros."""
    count = gigabytes << 29
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<u2", "fortran_order": False, "shape": (count,)}
        )
        file.truncate(file.tell() + 2 * count)
    return path


WATCHED = """
import re, sys, tracemalloc
from pathlib import Path
tracemalloc.start()
from zero_mpi.telemetry import metrics
from zero_mpi.train import trainer
from zero_mpi.train.command import main

def told(file, name):
    return int(re.search(rf"^{name}: +(\\d+)", Path("/proc/self", file).read_text(), re.M)[1])

class Watched(trainer.Trainer):
    def begin(self):
        self.read = told("io", "rchar")
        return super().begin()
    def close(self):
        memory = 1024 * told("smaps_rollup", "Rss"), tracemalloc.get_traced_memory()[1]
        sys.stderr.write("held %d %d read %d\\n" % (*memory, self.read))
        super().close()

trainer.Trainer = Watched
sys.modules["zero_mpi.train.command"].Trainer = Watched
main()
"""


@needs_mpiexec
@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 4, 8))])
def test_memory_and_start_do_not_grow_with_the_data(ranks, tmp_path):
    """20 GB of ids add less than 1 % of their size to the ranks' memory, and a start reads little of the ids.

    Pages of a process depend on waits of MPI and on the allocator, so the peak of what Python and NumPy
    allocate shows the effect of the number of windows: one bit for each would be 80 MB.
    """
    (tmp_path / "watched.py").write_text(WATCHED)
    rss, allocated, read = {}, {}, {}
    for gigabytes in (1, 20):
        data = sparse(tmp_path / f"{gigabytes}.npy", gigabytes)
        flags = [*SIZES, "--data", str(data), "--steps", "3", "--out", str(tmp_path / str(gigabytes))]
        flags += ["--vocab-size", "300"]
        status, output, errors = run_job(ranks, [str(tmp_path / "watched.py"), *flags], timeout=100)
        assert status == 0, output + errors
        lines = np.array(re.findall(r"^held (\d+) (\d+) read (\d+)$", errors, re.M), dtype=int)
        assert len(lines) == ranks
        rss[gigabytes], allocated[gigabytes], read[gigabytes] = *lines[:, :2].sum(axis=0), lines[:, 2].max()
    assert read[20] - read[1] < 64 << 20, "the bytes that a start reads grow with the data"
    assert rss[20] - rss[1] < 0.01 * 20 * 2**30
    assert allocated[20] - allocated[1] < 4 << 20, "the memory of a rank grows with the number of windows"
