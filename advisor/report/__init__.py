"""advisor.report."""
