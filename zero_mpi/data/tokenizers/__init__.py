"""Tokenizers: bytes, byte-level BPE and SentencePiece, from a GGUF or a tokenizer.json."""
