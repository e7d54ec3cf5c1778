"""Checkpoints: the file formats (`gguf`, `safetensors`, `huggingface`), saving, and reading.

`model.gguf` holds no tensors except the model's, as llama.cpp demands. `optimizer.gguf` holds the moments in
full shape, the step, and the settings that a resume must keep (`state`). Neither file depends on
the number of ranks, the strategy, the folder or the clock, so exact runs write identical bytes. A tensor
that is not a parameter (`rope_freqs.weight`) is part of the configuration and is written as it was read
(`ModelConfig.constants`). If it was computed from a config.json, the key `zero_mpi.rope_scaling` stores the
settings from which it was computed.

Writing (`state`, `parallel_write`): the table of tensors determines the position of each slice in a file, so
any rank can write a slice. A rank writes its slice, or sends it in chunks to rank 0 or to a rank of its node.

Checksums (`sound`): a tensor's digest is a hash of the hashes of its pieces. Slices end where pieces end
(except row shards), so each rank can hash its own slice. On resume, each rank checks a share of the tensors.

Background saves (`saver`): the same code runs on copies of the slices, in a thread of each rank, over
separate communicators. Ranks sum a failure flag together with the loss of each step, so all ranks see a
failed save at the same step.

Publishing (`folders`): no file or folder gets its final name before all ranks agree that nothing failed.

Reading: each rank reads its own slices and checks that their values are finite. Files are not memory-mapped,
because a file that shrinks while it is mapped kills the process.
"""
