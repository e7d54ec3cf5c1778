"""`zero-mpi tokenize`: converts text to token files in parallel, with the same bytes at any number of ranks.

`encode_parts` cuts inputs into parts and writes them; `work_folder` keeps the records of complete parts.
"""
