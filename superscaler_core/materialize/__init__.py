"""Materialize: every producer that does not fit its consumer becomes an rvdcomm plan."""

from superscaler_core.materialize.materialized import Materialized, materialize

__all__ = ["Materialized", "materialize"]
