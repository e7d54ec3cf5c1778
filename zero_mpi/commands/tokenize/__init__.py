"""`zero-mpi tokenize`: text into token files, in parallel over ranks, with the same bytes at any P.

`encode_parts` cuts inputs into parts and writes a part; `work_folder` has the records of complete parts.
"""
