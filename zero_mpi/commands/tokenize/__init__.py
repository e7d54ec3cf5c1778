"""`zero-mpi tokenize`: converts text to token files in parallel; the number of ranks changes no byte.

`encode_parts` cuts inputs into parts and writes them; `work_folder` keeps the records of complete parts.
"""
