"""Transports: the collectives that sharding needs, one interface, started and waited for separately."""

from zero_mpi.comm.base import DONE, Comm, Handle, Partition, ordered_sum
from zero_mpi.comm.serial import SerialComm

__all__ = ["DONE", "Comm", "Handle", "Partition", "SerialComm", "ordered_sum"]
