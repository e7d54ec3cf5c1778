"""Helpers that write and read a checkpoint in one call, with the functions that a run uses."""

import hashlib

from zero_mpi.checkpoint.folders import step_folder
from zero_mpi.checkpoint.saver import Saver
from zero_mpi.checkpoint.sound import open_checkpoint
from zero_mpi.checkpoint.state import load_state

FILES = ("model.gguf", "optimizer.gguf")


def save_checkpoint(out, optimizer, progress, description, keep=0):
    """Write OUT/step-NNNNNNNN and point OUT/latest to it. Collective. Returns the folder."""
    saver = Saver(out, optimizer, description, keep=keep)
    saver.save(progress)
    saver.close()
    return step_folder(out, progress.step)


def load_checkpoint(folder, optimizer):
    return load_state(open_checkpoint(folder), optimizer)


def digests(folder):
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES]
