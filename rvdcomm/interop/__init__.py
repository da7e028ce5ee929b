"""Adapters to other systems, one package each; none is imported by ``import rvdcomm``."""
