"""advisor.workload."""
