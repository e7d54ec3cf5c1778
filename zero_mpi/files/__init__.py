"""Files from others and our own: opened, parsed and shown with care, written whole or not at all."""
