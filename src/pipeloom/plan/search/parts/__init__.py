"""Searches of parts of the space of configurations, which take turns where memory is short. No torch here."""
