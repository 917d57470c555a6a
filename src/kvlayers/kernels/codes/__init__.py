"""What quantizers and kernels agree on: how codes, scales and the vectors of smoothing are laid out."""
