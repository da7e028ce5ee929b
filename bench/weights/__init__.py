"""Weight sync of a whole model, trainer ranks to inference ranks: ``python -m bench.weights``."""
