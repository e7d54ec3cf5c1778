"""Counts the calls by which this process, in all its threads, opens, writes and renames files: it replaces
the functions of Python's os module. Calls made by C libraries (MPI, shared memory) are not counted.
`kernel_writes` returns the system's own count of writes, which includes writes to sockets."""

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

BY_NAME = ("open", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "stat", "lstat", "scandir")
BY_HANDLE = ("write", "pwrite", "pwritev", "ftruncate", "fsync", "fdatasync")


class FileCalls:
    """Context manager that counts calls by file name in `counts`, and the bytes `written` to each file."""

    def __init__(self) -> None:
        self.counts, self.written = Counter[tuple[str, str]](), Counter[str]()
        self._names: dict[int, str] = {}
        self._real = {name: getattr(os, name) for name in (*BY_NAME, *BY_HANDLE)}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        for name, real in self._real.items():
            setattr(os, name, self._watching(name, real))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def of(self, call: str, file: str = "") -> int:
        """Return the number of calls on files whose names end in `file`."""
        return sum(
            count for (name, path), count in self.counts.items() if name == call and path.endswith(file)
        )

    def _watching(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            result = real(*arguments, **more)
            with self._lock:
                self._note(name, arguments, result)
            return result

        return call

    def _note(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        first = arguments[0] if arguments else "."
        file = self._names.get(first, "") if isinstance(first, int) else os.fsdecode(first)
        self.counts[name, file] += 1
        if name == "open":
            self._names[result] = file
        if name in ("write", "pwrite", "pwritev"):
            self.written[file] += result


def kernel_writes() -> int:
    """Return the number of writes of this process that the system has counted; 0 if unknown."""
    try:
        return int(Path("/proc/self/io").read_text().split("syscw: ")[1].split()[0])
    except OSError:
        return 0
