"""The GGUF format: index of a file, reader, header, writer."""
