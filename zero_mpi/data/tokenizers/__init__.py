"""Tokenizers: bytes, and byte-level BPE from a GGUF or a tokenizer.json."""
