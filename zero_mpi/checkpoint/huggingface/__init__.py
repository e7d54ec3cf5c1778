"""Folders as Hugging Face keeps models: their configuration, names, and order of rows."""
