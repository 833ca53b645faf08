"""Shared helpers: dataclass type checks, quantities as text, whole-number division, JSON input, file writes, cores."""
