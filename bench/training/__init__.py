"""Real training of small models on gloo processes: our plans and torch's ways, side by side."""
