"""The optimizer: update rules by name pattern (`rule`), rates, moving average and offload."""
