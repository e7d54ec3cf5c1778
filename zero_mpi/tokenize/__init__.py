"""`python -m zero_mpi.tokenize`: text into token files, in parallel over ranks, and the same bytes at any P.

`text_formats` reads texts (lines and packed files by `text_streams`), `parts` cuts the inputs into parts by
what they weigh alone and deals them out, `part_files` writes a part: a pair of Megatron's files and then the
record that it is complete. `work_folder` knows what a folder was begun with and what of it is there, `pulse`
lets ranks know of each other while each is at its own parts.

How many ranks there are decides who writes a part, and nothing of what is in it.
"""
