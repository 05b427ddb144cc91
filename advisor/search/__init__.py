"""Legal plans, priced and ranked."""

from advisor.search.rank import FAMILIES, OBJECTIVES, Request, family, price, search
from advisor.search.scaling import Size, fewest_gpus, resized, scaling, sizes_around
from advisor.search.space import Space, legal_plans
from advisor.search.types import Candidate, Rejected, SearchResult

__all__ = [
    "FAMILIES", "OBJECTIVES", "Candidate", "Rejected", "Request", "SearchResult", "Size", "Space", "family", "fewest_gpus", "legal_plans",
    "price", "resized", "scaling", "search", "sizes_around",
]  # fmt: skip
