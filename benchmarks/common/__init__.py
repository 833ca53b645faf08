"""What the benchmarks share: processes, workloads, systems under test, statistics, tables."""
