"""What a training run is told, and what is refused of it before anything starts. No torch here."""
