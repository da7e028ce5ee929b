"""Arrival: whether values that were moved or written are those that were there, bit by bit."""

from rvdcomm.arrival.copies import Copy, copies_held, parts_owned
from rvdcomm.arrival.digests import digest_converted, digest_of
from rvdcomm.arrival.tally import Mismatch, Tally, differing, mismatches

__all__ = [
    "Copy",
    "Mismatch",
    "Tally",
    "copies_held",
    "differing",
    "digest_converted",
    "digest_of",
    "mismatches",
    "parts_owned",
]
