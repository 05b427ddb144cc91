"""cost_models.terms."""
