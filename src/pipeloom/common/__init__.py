"""Shared helpers: dataclass types, quantities as text, whole-number division, JSON, file writes, cores, memory."""
