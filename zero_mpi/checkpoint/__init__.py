"""Checkpoints: the file formats (`gguf`, `safetensors`, `huggingface`), and saving and reading a state.

`model.gguf` holds the model's tensors and nothing else, as llama.cpp demands. `optimizer.gguf` holds the
moments in full shape, the step, and the settings that a resume must keep (`state`). Neither depends on the
number of ranks, the strategy, the folder or the clock: exact runs write identical bytes. A tensor that is not
a parameter (`rope_freqs.weight`) is part of the configuration and is written as it was read
(`ModelConfig.constants`). If it was computed from a config.json, the key `zero_mpi.rope_scaling` stores the
settings it was computed from.

Writing (`state`, `parallel_write`). The position of each slice in a file follows from the table of tensors,
so any rank can write it: its owner, or rank 0 or one rank of each node, which receives the slice in chunks.

Checksums (`sound`). A tensor's digest is made of hashes of pieces. Slices end at multiples of a piece, so
each rank hashes its own slice. On resume the ranks divide the tensors among them and check every one.

In the background (`saver`) the same code runs on copies of the slices, in a thread of each rank, over
separate communicators. The flag that a save failed is sent together with the loss of a step, so all ranks
see it at the same step.

Publishing (`folders`). No file or folder gets its final name before all ranks agree that nothing failed.

Reading. Each rank reads its own slices and checks that values are finite. Files are not memory-mapped: a file
that shrinks under a mapping ends the process.
"""
