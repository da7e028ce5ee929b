"""Real training of small models on gloo processes: our plans compared with torch's methods."""
