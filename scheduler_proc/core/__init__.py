"""A sequence from its arrival to its end: request, row, batch, results, output."""
