"""Results in documents: which part of which page says what of which result file."""
