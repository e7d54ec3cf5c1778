"""Model folders in Hugging Face's format: their configuration, tensor names, and order of rows."""
