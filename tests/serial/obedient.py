"""Program that runs commands of the package without root's file permissions. For test_paths.py.

python obedient.py zero_mpi.train FLAGS     runs one
python obedient.py                          runs the commands of a JSON object on stdin, each in a fork
"""

import ctypes
import importlib
import json
import os
import sys

from zero_mpi.commands.main import module_of


def obey():
    """Give up root's right to ignore file permissions (capabilities 1 and 2 of Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable rights; then their upper halves
    assert libc.capget(header, sets) == 0
    for place in range(3):
        sets[place] &= ~0b110
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def all_of(cases):
    """Return the results of all cases: [status, stdout, stderr] by name."""
    for name in {entry(*command[:2]) for command in cases.values()}:
        importlib.import_module(name)
    obey()
    return {name: forked(command) for name, command in cases.items()}


def entry(package, name):
    return module_of(name if package == "zero_mpi" else "train")


def forked(command):
    pipes = [os.pipe(), os.pipe()]
    child = os.fork()
    if not child:
        for number, (_, end) in zip((1, 2), pipes, strict=True):
            os.dup2(end, number)
        try:
            main(*command)
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        except BaseException as error:
            os.write(2, repr(error).encode())
        os._exit(70)
    output = []
    for reading, writing in pipes:
        os.close(writing)
        with open(reading, "rb") as file:
            output.append(file.read().decode(errors="replace"))
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *output]


def main(package, *arguments):
    module = entry(package, arguments[0])
    sys.argv[1:] = arguments[package == "zero_mpi" :]
    importlib.import_module(module).main()


if __name__ == "__main__":
    if sys.argv[1:]:
        obey()
        main(*sys.argv[1:])
    print(json.dumps(all_of(json.load(sys.stdin))))
