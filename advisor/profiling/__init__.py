"""advisor.profiling."""
