"""`zero-mpi tokenize`: text into token files, in parallel over ranks, with the same bytes at any P.

`encode_parts` reads texts, cuts inputs into parts by their weight alone, deals them out and writes a part;
`work_folder` keeps the records of complete parts. The number of ranks decides which rank writes a part, not
its content.
"""
