"""What `kvlayers bench`, `kvlayers fidelity` and the benchmarks measure with."""
