"""`zero-mpi evaluate`: measures how well models predict a text, and which answers they prefer.

`task` reads the flags and opens the models, `command` gives text and questions (`choices`) to all ranks,
`measure` computes losses with a sharded model, and `scores` computes the results from the losses. All losses
are in one vector in the order of the text, so the output is the same for any number of ranks.
"""
