"""From two layouts to a path: the states between them, the primitives, and the search."""
