"""What the job of this process leaves for its sweep, and what its sweep varies."""

EXACT_ROW: dict[str, object] = {}
"""Row of exact attention that the job was compared with"""
SWEPT: list[str] = []
"""Overrides of the job that other jobs of its sweep do not have; empty outside of a sweep"""
