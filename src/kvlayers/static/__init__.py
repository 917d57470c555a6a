"""Memory that is reserved once, at one address, for compiled code and CUDA graphs."""
