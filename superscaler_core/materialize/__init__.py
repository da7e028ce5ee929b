"""Materialize: every producer that does not fit its consumer becomes an rvdcomm plan."""
