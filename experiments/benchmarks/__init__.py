"""Timings of the machine, of our steps and loop, and of the same work in other libraries."""
