"""GPU kernels and their readable references; importing this loads neither torch nor CUDA."""
