"""The optimizer: update rules by name pattern (`rule`), learning rates, moving average and offload."""
