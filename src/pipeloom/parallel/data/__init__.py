"""Data-parallel replicas: units of parameters, main parameters, gradient reduction and ZeRO."""
