"""What a tensor is made of: memory, the steps of its views, gradient mode."""
