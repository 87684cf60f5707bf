"""Groups of ranks, links of pipeline stages, and the part of the model that each rank has."""
