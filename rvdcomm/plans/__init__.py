"""Plans: of one tensor, of many tensors, of a gradient; each owns its program."""
