"""`zero-mpi samples`: the text that training would read of conversations, and the tokens in the loss."""
