"""Routes of operators: probes, metrics, control."""
