"""Server that forks ranks from a process with the package loaded, instead of starting new processes.

For a rank, starting Python and loading NumPy, the package and the compiled operations takes longer than most
tests. So a test process has a server for each backend, which loads all modules once and forks a rank for each
client. The launcher starts the client, which imports almost nothing. It sends its files, environment, folder
and cores, forwards signals, and ends with the rank's status; if it is killed, the rank is killed too. Code
before `main()` thus runs once for many ranks, so tests of the start itself, and tests that set variables,
start ranks as users do: `run_job(..., warm=False)`.
"""

import _signal as signal
import _socket
import array
import json
import os
import sys

if sys.argv[1:2] == ["server"]:  # slow imports that a client does not need
    import contextlib
    import fcntl
    import gc
    import runpy
    import select
    import socket
    from importlib.util import find_spec
    from pathlib import Path

    remembered: list[tuple[object, str, object]] = []

INT, MOST_FILES = array.array("i").itemsize, 8
HEAD = 8  # size in bytes of the length at the beginning of a request
SIGNALS = ("HUP", "INT", "QUIT", "USR1", "USR2", "TERM", "CONT")  # signals that a client forwards


def client(address: str, arguments: list[str]) -> None:
    """Request a forked rank and end with its status. The client imports little: each rank has one."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect("\0" + address)
    files = [0, 1, 2, *(int(os.environ[name]) for name in ("PMI_FD",) if name in os.environ)]
    fields = {"arguments": arguments, "environ": dict(os.environ), "folder": os.getcwd(), "files": files}
    fields["cores"] = sorted(os.sched_getaffinity(0))
    request = json.dumps(fields).encode()
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([len(request).to_bytes(HEAD, "little")], rights)
    connection.sendall(request)
    rank = int(connection.recv(64))
    for name in SIGNALS:
        signal.signal(getattr(signal, f"SIG{name}"), lambda number, frame: os.kill(rank, number))
    answer = connection.recv(64)
    code = os.waitstatus_to_exitcode(int(answer)) if answer else 1  # no answer: the server has died
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


class Server:
    """Server that forks a rank for each client and reports the rank's status; a rank ends with its client.

    ranks   (process, file that signals its end, client) keys: this file, and the client's file
    """

    def __init__(self, address: str) -> None:
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind("\0" + address)
        self.listening.listen(64)
        self.ranks: dict[int, tuple[int, int, socket.socket]] = {}
        self.waiting = select.poll()
        for file in (0, self.listening.fileno()):
            self.waiting.register(file, select.POLLIN)

    def serve(self) -> dict:
        print("ready", flush=True)
        while True:
            for file, _ in self.waiting.poll():
                if file == 0:
                    self.leave()
                elif file in self.ranks:
                    self.end(file)
                elif file == self.listening.fileno() and (request := self.begin()) is not None:
                    return request

    def leave(self) -> None:
        for pid in {pid for pid, _, _ in self.ranks.values()}:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def begin(self) -> dict | None:
        """Fork the rank of a client. In the rank, return its request."""
        connection, _ = self.listening.accept()
        head, rights, _, _ = connection.recvmsg(HEAD, socket.CMSG_SPACE(MOST_FILES * INT))
        files = array.array("i", rights[0][2] if rights else b"").tolist()
        with connection.makefile("rb") as stream:
            text = stream.read(int.from_bytes(head, "little"))
        pid = os.fork() if text.endswith(b"}") else -1  # no rank if the client was killed while it sent this
        if pid == 0:
            for handle in (connection, self.listening, *{each for _, _, each in self.ranks.values()}):
                handle.close()
            for ended in {ended for _, ended, _ in self.ranks.values()}:
                os.close(ended)
            return json.loads(text) | {"given": files}
        for each in files:
            os.close(each)
        if pid < 0:
            connection.close()
            return None
        with contextlib.suppress(OSError):  # the client was killed; its file ends the rank
            connection.sendall(str(pid).encode())
        rank = pid, os.pidfd_open(pid), connection
        for file in (rank[1], connection.fileno()):
            self.ranks[file] = rank
            self.waiting.register(file, select.POLLIN)
        return None

    def end(self, file: int) -> None:
        pid, ended, connection = self.ranks[file]
        if file != ended:  # a client's file only signals its end
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        for each in (ended, connection.fileno()):
            self.waiting.unregister(each)
            del self.ranks[each]
        with contextlib.suppress(OSError):  # the client was killed
            connection.sendall(str(status).encode())
        connection.close()
        os.close(ended)


def become(request: dict) -> list[str]:
    """Take over the client's files, environment and folder. Return its arguments."""
    files = [fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in request["given"]]
    for file in request["given"]:
        os.close(file)
    for file, target in zip(files, request["files"], strict=True):
        os.dup2(file, target)
        os.close(file)
    os.setsid()
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cores"])
    for name in SIGNALS:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from zero_mpi import environment

    threads = {name: os.environ[name] for name in environment.THREADS if name in os.environ}
    os.environ.clear()
    os.environ.update(request["environ"])
    for name, value in threads.items():  # keep the values with which NumPy was loaded
        os.environ.setdefault(name, value)
    environment.prepare()
    return request["arguments"]


def load() -> None:
    import zero_mpi.commands.evaluate.command
    import zero_mpi.train.command  # noqa: F401
    from zero_mpi import ops

    find_spec("mpi4py.MPI")  # loads the MPI library without starting MPI
    ops.prepare()
    if ops.compiles():
        ops.fill_cache(ops.GENERATION)
    compute_once()
    gc.freeze()


def compute_once() -> None:
    """Cache results that every rank would compute; computing them takes half of a small job's time."""
    import numpy as np
    import numpy.random  # NumPy loads these on first use

    from zero_mpi import environment
    from zero_mpi.launch import consistency
    from zero_mpi.ops import trial
    from zero_mpi.train import summary as mfu

    package = Path(environment.__file__).parents[1]
    remember(consistency, "source_digest", package)
    for module, name in ((trial, "digest"), (mfu, "rate")):
        remember(module, name, np.dtype(np.float32))


def remember(module: object, name: str, argument: object) -> None:
    """Cache a function's result for an argument in ranks that compute as this process does."""
    from zero_mpi import device
    from zero_mpi.ops import threads

    def now() -> tuple[object, int]:
        return device.in_use(), threads._threads

    function = getattr(module, name)
    value, usual = function(argument), now()
    setattr(module, name, lambda *args: value if args == (argument,) and now() == usual else function(*args))
    remembered.append((module, name, function))


def forget() -> None:
    for module, name, function in remembered:
        setattr(module, name, function)


def main() -> None:
    """`warm_start.py client ADDRESS ARGUMENTS...`, or `warm_start.py server ADDRESS`."""
    role, address, *arguments = sys.argv[1:]
    if role == "client":
        client(address, arguments)
        return
    load()
    arguments = become(Server(address).serve())
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        forget()
        sys.argv[:] = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
