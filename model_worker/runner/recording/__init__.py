"""Steps that are recorded once and then run as one: of C++ kernels a program, on CUDA graphs."""
