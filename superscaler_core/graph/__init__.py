"""Graph: a model as ops on tensors, with the loops that index them, and parts of an op's work."""
