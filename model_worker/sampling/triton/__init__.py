"""GPU kernels for sampling."""
