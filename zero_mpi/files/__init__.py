"""Files of others and of our own: opened, parsed and shown with care, written whole or not at all."""
