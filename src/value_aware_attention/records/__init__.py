"""Measurements, as data and in words. Nothing here imports torch."""
