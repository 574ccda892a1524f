"""Running and rewriting graphs of `torch.fx`."""
