"""What is legal: the rules of schedules and of programs, and `check`, which asks them."""
