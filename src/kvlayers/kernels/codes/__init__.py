"""How codes, scales and the vectors of smoothing are laid out, as quantizers and kernels agree, and what packs them."""
