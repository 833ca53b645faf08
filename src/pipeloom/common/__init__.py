"""Helpers of every room: typed fields, quantities as text, JSON that people write, files written whole."""
