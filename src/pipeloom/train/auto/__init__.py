"""Plans of a run: chosen for its processes, compared with its steps, and chosen again."""
