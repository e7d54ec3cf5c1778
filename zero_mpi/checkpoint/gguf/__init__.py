"""The GGUF file format: index, reader, header and writer."""
