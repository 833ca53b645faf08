"""Measurements of this machine, which predictions for cluster ``local`` use. No torch here."""
