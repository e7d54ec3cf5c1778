"""Transports: the collectives that sharding needs, one interface, started and waited for separately."""

from zero_mpi.comm.base import DONE, Comm, Handle
from zero_mpi.comm.files import OutputFile, PlainFile
from zero_mpi.comm.partition import Partition, Piece
from zero_mpi.comm.serial import SerialComm

__all__ = [
    "DONE",
    "Comm",
    "Handle",
    "OutputFile",
    "Partition",
    "Piece",
    "PlainFile",
    "SerialComm",
]
