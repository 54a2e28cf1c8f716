"""Train PyTorch models on the machines you have: unequal, joined by unequal links, not always there."""
