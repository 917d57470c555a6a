"""What the benchmarks share: models, contenders, timing, and reports. Nothing here is run by itself."""
