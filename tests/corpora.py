"""A corpus by the flags of a run, given by name."""

from zero_mpi.data import corpus
from zero_mpi.data.document_reader import DocumentReader


def load_corpus(paths, *, val_fraction, context, seed, val_paths=(), **reading):
    return corpus.load_corpus(paths, DocumentReader(**reading), val_fraction, context, seed, val_paths)
