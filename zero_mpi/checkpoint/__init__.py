"""Checkpoints: the file formats (`gguf`, `safetensors`, `huggingface`), and saving and reading a state.

`model.gguf` holds the model's tensors and nothing else, as llama.cpp demands. `optimizer.gguf` holds the
moments in full shape, the step, and the settings that a resume must keep (`state`). Neither depends on the
number of ranks, the strategy, the folder or the clock, so exact runs write identical bytes. A tensor that is
not a parameter (`rope_freqs.weight`) is part of the configuration and is written as it was read
(`ModelConfig.constants`). If it was computed from a config.json, the key `zero_mpi.rope_scaling` stores the
settings from which it was computed.

Writing (`state`, `parallel_write`): the table of tensors determines where each slice is in a file, so any
rank can write it: its owner, or else rank 0 or one rank of each node, which receives slices in chunks.

Checksums (`sound`): a tensor's digest is made of hashes of pieces. Slices end at multiples of a piece, so
each rank hashes its own slice. On resume the ranks divide the tensors among them and check every tensor.

Background saves (`saver`): the same code runs on copies of the slices, in a thread of each rank, over
separate communicators. A flag for a failed save is sent together with the loss of a step, so all ranks see it
at the same step.

Publishing (`folders`): no file or folder gets its final name before all ranks agree that nothing failed.

Reading: each rank reads its own slices and checks that their values are finite. Files are not memory-mapped,
because a file that shrinks while it is mapped ends the process.
"""
