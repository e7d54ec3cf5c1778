"""`zero-mpi tokenize`: converts text to token files in parallel, with the same bytes on any number of ranks.

`encode_parts` cuts inputs into parts and writes them; `work_folder` has the records of complete parts.
"""
