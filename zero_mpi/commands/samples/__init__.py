"""`zero-mpi samples`: what training would read of conversations, and what of it the loss counts."""
