"""`zero-mpi evaluate`: how well models predict a text, and which answers they prefer.

`task` reads the flags and opens the models, `command` shares text and questions (`choices`) with all ranks.
Both become rows of tokens with some scored targets; each part has its own loss. `measure` runs them through a
model that is sharded over the ranks, `scores` computes figures from the losses and text from the figures.

All losses of a model are gathered into one vector, in the order of the text, and every sum is computed from
it: so the output is the same at any number of ranks and over any transport.
"""
