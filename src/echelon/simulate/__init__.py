"""What would happen? A virtual clock that runs real policies on real gradients, in one process."""
