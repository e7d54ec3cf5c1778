"""Checkpoints: the GGUF format (reader, writer), the pair of files (state), where they lie (manager)."""
