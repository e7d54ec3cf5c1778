"""Files from others and our own: safely opened, parsed and shown; written completely or not at all."""
