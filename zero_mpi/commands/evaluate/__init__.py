"""`zero-mpi evaluate`: measures how well models predict a text, and which answers they prefer.

`task` reads the flags and opens the models, `command` shares text and questions (`choices`) with all ranks,
`measure` computes their losses with a sharded model, and `scores` computes figures from the losses. All sums
are over one vector in the order of the text, so the output is the same for any number of ranks.
"""
