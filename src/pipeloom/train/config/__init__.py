"""The options of a training run, and their validation before it starts. No torch here."""
