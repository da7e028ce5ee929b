"""Tests of third-party models: training under each plan must match training on one device."""
