"""The search for the best plan of a transformer on a cluster. No torch here."""
