"""Shared helpers: dataclass type checks, quantities as text, whole-number division, JSON, file writes, cores, memory."""
