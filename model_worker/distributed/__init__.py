"""distributed: the group of tensor-parallel ranks, and which part of the model each of them has."""
