"""Helper that builds a corpus from the flags of a run, passed as keyword arguments."""

from zero_mpi.data import corpus
from zero_mpi.data.document_reader import DocumentReader


def load_corpus(paths, *, val_fraction, context, seed, val_paths=(), **reading):
    return corpus.load_corpus(paths, DocumentReader(**reading), val_fraction, context, seed, val_paths)
