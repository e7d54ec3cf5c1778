"""Model folders in Hugging Face's format: their configuration, names, and order of rows."""
