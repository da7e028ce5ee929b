"""Truth: predicted step times beside step times that others measured on real clusters."""
