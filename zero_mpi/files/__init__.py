"""Safe access to files: opening, parsing and displaying files from others, and atomic writes."""
