"""Shared helpers: dataclass type checks, quantities as text, JSON input, atomic file writes, lazy imports."""
