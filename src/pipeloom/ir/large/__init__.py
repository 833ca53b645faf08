"""Schedules of a million actions: orders packed into integers, and rules asked of whole columns."""
