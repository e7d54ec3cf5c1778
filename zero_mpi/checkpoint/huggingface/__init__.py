"""Model folders in Hugging Face's format: their settings, names of tensors, and order of rows."""
