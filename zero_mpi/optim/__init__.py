"""The optimizer: rules of update by name pattern (`rule`), and what is around them."""
