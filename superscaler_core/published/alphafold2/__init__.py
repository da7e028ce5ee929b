"""AlphaFold2's Evoformer, and the published ways to parallelize it."""
